"""The local server's process: failures at the start. tests/e2e/test_local_model_server.py covers successful starts."""

import asyncio
import sys
from pathlib import Path

import pytest

from contract.errors import ModelUnavailable
from orchestrator.models.local import PACKAGE_ROOT, LocalModelServer


@pytest.mark.parametrize(("start_timeout_s", "error"), [(60.0, "ended while loading"), (0.001, "did not load in")])
async def test_weights_that_do_not_load_leave_no_process(tmp_path: Path, start_timeout_s: float, error: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    server = LocalModelServer(tmp_path / "bad.gguf", start_timeout_s=start_timeout_s)
    with pytest.raises(ModelUnavailable, match=error):
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
