"""A command that `toolcrew` prints as a hint resumes the interrupted work, on a real stack."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import TOOLCREW, Footprint, Stack
from tests.support.stack.waiting import SOON_S, wait_until

pytestmark = pytest.mark.stack


def test_the_printed_hint_of_a_stopped_command_resumes_the_batch(
    stack: Stack, footprint: Footprint, tmp_path: Path
) -> None:
    reach = {"TOOLCREW_REDIS_URL": stack.redis_url}

    def toolcrew(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return run_toolcrew(footprint, *arguments, environment=reach)

    assert toolcrew("tenants", "add", "acme-hints").returncode == 0
    try:
        file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        file.write_text('{"id": "a", "tool": "bash_tool", "arguments": {"command": "sleep 8; echo done"}}\n')
        argv = [
            TOOLCREW,
            "batches",
            "submit",
            str(file),
            "--tenant",
            "acme-hints",
            "--id",
            "hints",
            "--output",
            str(out),
        ]
        environment = footprint.environment(reach)
        process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        def is_running() -> bool:
            status = toolcrew("batches", "show", "hints", "--tenant", "acme-hints", "--json")
            return status.returncode == 0 and json.loads(status.stdout)["request_counts"]["running"] == 1

        wait_until(is_running, SOON_S, "the item did not begin")
        process.terminate()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 143, stderr
        (hint,) = {found for found in re.findall(r"`(toolcrew [^`]+)`", stderr) if "resume" in found}

        resumed = toolcrew(*shlex.split(hint)[1:])
        assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == ["a"], resumed.stderr
    finally:
        assert toolcrew("tenants", "remove", "acme-hints").returncode == 0
