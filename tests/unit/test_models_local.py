"""The local server's process: failures at the start. tests/e2e/test_local_model_server.py covers successful starts."""

import asyncio
import sys
from pathlib import Path

import pytest

from contract.errors import ModelUnavailable
from orchestrator.models.local import PACKAGE_ROOT, LocalModelServer


async def test_weights_that_do_not_load_are_an_operators_error_and_leave_no_process(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    server = LocalModelServer(tmp_path / "bad.gguf")
    with pytest.raises(ModelUnavailable, match="ended while loading"):
        await server.__aenter__()
    assert server.pid is None


async def test_a_server_that_does_not_come_up_in_time_is_ended(tmp_path: Path) -> None:
    server = LocalModelServer(tmp_path / "none.gguf", start_timeout_s=0.001)
    with pytest.raises(ModelUnavailable, match="did not load in"):
        await server.__aenter__()
    assert server.pid is None


def test_every_server_has_a_key_of_its_own(tmp_path: Path) -> None:
    assert LocalModelServer(tmp_path).api_key != LocalModelServer(tmp_path).api_key


async def test_the_program_ends_when_stdin_ends_before_a_key_came(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.models.local_server", "--weights", str(tmp_path)]
    pipe, silent = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=silent, stdout=pipe, stderr=silent, cwd=PACKAGE_ROOT)
    stdout, _ = await process.communicate()
    assert (stdout, process.returncode) == (b"", 1)
