"""docs/tutorial.md and docs/quick-start.md: every command is run as it stands there, in its order, on one stack, by a
shell that keeps what it is told.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_server import open_command_server
from tests.stack import Stack, open_stack, require_engine

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
QUICK_START = (ROOT / "docs" / "quick-start.md").read_text()

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def commands_of(page: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


def run(commands: list[str], folder: Path, stack: Stack) -> "subprocess.CompletedProcess[str]":
    """In one shell that ends at the first command that fails."""
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    with open_command_server(stack.footprint.folder) as commands_of_ours:
        path = f"{commands_of_ours}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"TOOLCREW_REDIS_URL": stack.redis_url, "PATH": path, "TOOLCREW_TRACES": str(folder / "traces")}
        script = "set -eu\n" + "\n".join(
            f"echo '## {number}' >&2\n{command}" for number, command in enumerate(commands)
        )
        environment = stack.footprint.environment(own)
        return subprocess.run(
            ["sh"], input=script, text=True, cwd=folder, env=environment, capture_output=True, timeout=500, check=False
        )


def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    commands = commands_of(TUTORIAL)
    with open_stack(require_engine(), {"TOOLCREW_WORKSPACE_STORE": str(tmp_path / "store")}) as stack:
        done = run(commands, tmp_path, stack)

    last = int(re.findall(r"^## (\d+)$", done.stderr, re.MULTILINE)[-1])
    assert done.returncode == 0, f"{commands[last]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert last == len(commands) - 1
    assert "a signed call was answered" in done.stdout
    assert "\n7\n" in done.stdout
    assert "hello from /tmp" in done.stdout
    assert "\nthere is no network\n" in done.stdout
    assert "refused: exit code" in done.stdout
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}-out.jsonl").read_text().splitlines()]
        for name in ("acme", "bolt")
    }
    assert sorted(row["custom_id"] for row in rows["acme"]) == ["note", "sum", "system"]
    assert [row["custom_id"] for row in rows["bolt"]] == ["user"]
    assert "PERMISSION_DENIED" in (tmp_path / "bolt-out.errors.jsonl").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_every_command_of_the_quick_start_works(stack: Stack, tmp_path: Path) -> None:
    done = run(commands_of(QUICK_START), tmp_path, stack)

    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "hello from" in done.stdout
