"""Run every `sh` command of the guides, in order. Each page has one shell, which ends at the first failure."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_server.running import running_model_server
from tests.support.cli.command_server import open_command_server
from tests.support.stack.stack import Stack, open_stack, require_engine

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.stack


def read_commands(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def run(commands: list[str], folder: Path, stack: Stack, **variables: str) -> "subprocess.CompletedProcess[str]":
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    with open_command_server(stack.footprint.folder) as command_folder:
        path = f"{command_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"TOOLCREW_REDIS_URL": stack.redis_url, "PATH": path, "TOOLCREW_TRACES": str(folder / "traces")}
        script = "set -eu\n" + "\n".join(
            f"echo '## {number}' >&2\n{command}" for number, command in enumerate(commands)
        )
        environment = stack.footprint.environment({**own, **variables})
        done = subprocess.run(
            ["sh"], input=script, text=True, cwd=folder, env=environment, capture_output=True, timeout=500, check=False
        )
    last = int(re.findall(r"^## (\d+)$", done.stderr, re.MULTILINE)[-1])
    assert done.returncode == 0, f"{commands[last]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert last == len(commands) - 1
    return done


def test_every_command_of_get_started_works(tmp_path: Path) -> None:
    with open_stack(require_engine(), {"TOOLCREW_WORKSPACE_STORE": str(tmp_path / "store")}) as stack:
        done = run(read_commands("get-started.md"), tmp_path, stack)

    assert "a signed call was answered" in done.stdout
    assert "\n7\n" in done.stdout
    assert "hello from /tmp" in done.stdout
    assert "\nthere is no network\n" in done.stdout
    assert "refused: exit code" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "acme-out.jsonl").read_text().splitlines()]
    assert sorted(row["custom_id"] for row in rows) == ["note", "sum", "system"]
    assert "the file is refused: exit code" in done.stdout
    assert not (tmp_path / "bolt-out.jsonl").exists()
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_every_command_of_sessions_works(stack: Stack, tmp_path: Path) -> None:
    done = run(read_commands("sessions.md"), tmp_path, stack)

    assert "hello from /tmp" in done.stdout
    assert "\n42\n" in done.stdout
    assert (tmp_path / "names.txt").read_bytes() == (ROOT / "examples" / "tutorial" / "names.txt").read_bytes()


def test_every_command_of_batches_works(tmp_path: Path) -> None:
    script = ROOT / "examples" / "fix-the-test" / "script.jsonl"
    with open_stack(require_engine(), {}) as stack, running_model_server(script) as server:
        done = run(read_commands("batches.md"), tmp_path, stack, **server.environment())

    rows = [json.loads(line) for line in (tmp_path / "fixes.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert all(row["error"] is None for row in rows)
    assert done.stdout.count("right") >= len(rows)
    assert "<svg" in (tmp_path / "fixes.html").read_text()
