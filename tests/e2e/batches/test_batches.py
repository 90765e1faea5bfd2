"""`toolcrew batch` as users type it, on a real pool with a model that follows a script: rows, kills during the batch,
and interruptions.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_server.running import ModelServer, running_model_server
from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import TOOLCREW, Footprint, Stack
from tests.support.stack.waiting import SOON_S, wait_until

pytestmark = pytest.mark.stack

STEPS = 3
"""Calls of each item. Each call adds a line to a file of its workspace and counts the lines, so that a repeated
execution appears in the answer.
"""
SCRIPT: list[dict[str, Any]] = [
    *(
        {
            "kind": "rule",
            "when": {"step": step},
            "reply": {
                "calls": [
                    {"name": "bash_tool", "arguments": {"command": f"echo {step} >> acts; sleep 0.2; wc -l < acts"}}
                ]
            },
        }
        for step in range(STEPS)
    ),
    {
        "kind": "rule",
        "when": {"observation": "(?P<lines>\\d+)"},
        "reply": {"text": "item {{item}} acted {{match.lines}} times"},
    },
]


class Shell:
    """A user's shell whose environment names the shared stack and a model server."""

    def __init__(self, stack: Stack, footprint: Footprint, server: ModelServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self._footprint = footprint
        self.environment = {
            "TOOLCREW_REDIS_URL": stack.redis_url,
            "TOOLCREW_TRACES": str(folder / "traces"),
            **server.environment(),
        }

    def write(self, count: int) -> Path:
        """Write a batch of `count` items."""
        file = self.folder / "in.jsonl"
        file.write_text(
            "".join(
                json.dumps({"id": f"i{number}", "instruction": f"[item {number}] act"}) + "\n"
                for number in range(count)
            )
        )
        return file

    def toolcrew(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run_toolcrew(self._footprint, *arguments, environment=self.environment, within_s=200)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = self._footprint.environment(self.environment)
        return subprocess.Popen(
            [TOOLCREW, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def rows(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def shell(stack: Stack, footprint: Footprint, tmp_path: Path) -> Iterator[Shell]:
    with running_model_server(SCRIPT) as server:
        yield Shell(stack, footprint, server, tmp_path)


def answers(rows: list[dict[str, Any]]) -> dict[str, str]:
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row["response"]["body"]["answer"] for row in rows}


def expected(count: int) -> dict[str, str]:
    return {f"i{number}": f"item {number} acted {STEPS} times" for number in range(count)}


def test_every_line_of_a_batch_becomes_a_row(shell: Shell) -> None:
    done = shell.toolcrew(
        "batches", "submit", str(shell.write(8)), "--output", str(shell.folder / "out.jsonl"), "--id", "rows"
    )
    assert (done.returncode, done.stdout.split()) == (0, ["rows"]), done.stderr
    assert answers(shell.rows()) == expected(8)
    assert shell.rows("out.errors.jsonl") == []
    status = json.loads(shell.toolcrew("batches", "show", "rows", "--json").stdout)
    assert (status["status"], status["request_counts"]["completed"]) == ("completed", 8)
    logs = [
        json.loads(line) for line in shell.toolcrew("batches", "show", "--logs", "rows", "--json").stdout.splitlines()
    ]
    stored_events = [json.loads(line) for line in (shell.folder / "out.events.jsonl").read_text().splitlines()]
    assert [item["type"] for item in logs[:-1]] == [item["type"] for item in stored_events]
    assert (logs[-1]["type"], logs[-1]["done"], logs[-1]["calls"]) == ("summary", 8, 8 * STEPS)
    page = shell.folder / "page.html"
    assert (
        shell.toolcrew(
            "batches", "export", "rows", "--html", str(page), "--events", str(shell.folder / "out.events.jsonl")
        ).returncode
        == 0
    )
    assert "submitted with 8 items" in page.read_text()
    shown = shell.toolcrew("traces", "show", shell.rows()[0]["id"])
    assert (shown.returncode, shown.stdout.count("wc -l < acts") >= STEPS) == (0, True)
    results = shell.toolcrew("batches", "export", "rows").stdout.splitlines()
    assert sorted(map(json.loads, results), key=lambda row: str(row["id"])) == sorted(
        shell.rows(), key=lambda row: str(row["id"])
    )


def test_a_batch_resumes_where_a_killed_orchestrator_stopped(shell: Shell) -> None:
    out = str(shell.folder / "out.jsonl")
    first = shell.start(
        "batches", "submit", str(shell.write(12)), "--output", out, "--id", "killed", "--concurrency", "6"
    )
    wait_until(lambda: shell.server.stats()["replies"] >= 12, SOON_S, lambda: str(shell.server.stats()))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    running = 12 - len(shell.rows())
    assert running > 0
    done = shell.toolcrew("batches", "resume", "killed", "--output", out)
    assert done.returncode == 0, done.stderr
    assert answers(shell.rows()) == expected(12)
    # A reply may have been paid for but not logged: at most one for each killed run.
    assert shell.server.stats()["replies_repeated"] <= 6


def test_the_first_interrupt_finishes_running_items_and_the_batch_can_be_resumed(shell: Shell) -> None:
    out = str(shell.folder / "out.jsonl")
    first = shell.start(
        "batches", "submit", str(shell.write(10)), "--output", out, "--id", "interrupted", "--concurrency", "2"
    )
    wait_until(lambda: shell.server.stats()["replies"] >= 2, SOON_S, lambda: str(shell.server.stats()))
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "toolcrew batches resume interrupted" in stderr
    assert 2 <= len(shell.rows()) < 10
    assert shell.server.stats()["replies"] == len(shell.rows()) * (STEPS + 1)
    assert shell.toolcrew("batches", "resume", "interrupted", "--output", out).returncode == 0
    assert answers(shell.rows()) == expected(10)
    assert shell.server.stats()["replies_repeated"] == 0


def test_the_second_interrupt_stops_at_once_and_no_item_is_lost(shell: Shell) -> None:
    out = str(shell.folder / "out.jsonl")
    first = shell.start(
        "batches", "submit", str(shell.write(6)), "--output", out, "--id", "stopped", "--concurrency", "3"
    )
    wait_until(lambda: shell.server.stats()["replies"] >= 3, SOON_S, lambda: str(shell.server.stats()))
    first.send_signal(signal.SIGINT)
    assert first.stderr is not None
    while "again to stop now" not in first.stderr.readline():
        pass
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    assert shell.toolcrew("batches", "resume", "stopped", "--output", out).returncode == 0
    assert answers(shell.rows()) == expected(6)
