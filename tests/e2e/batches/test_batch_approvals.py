"""`toolcrew batches submit --ask` on a real pool. Other processes answer the questions, even while no orchestrator
processes the batch.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.model_server.running import ModelServer, running_model_server
from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import TOOLCREW, Footprint, Stack
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.runs.batches import run_id

pytestmark = pytest.mark.stack

RISKY = "rm -rf /srv/nothing; echo as it was asked"
SCRIPT: list[dict[str, Any]] = [
    {"kind": "rule", "when": {"step": 0}, "reply": {"calls": [{"name": "bash_tool", "arguments": {"command": RISKY}}]}},
    {
        "kind": "rule",
        "when": {"observation": "(?P<said>was not run: .{0,200})"},
        "reply": {"text": "it {{match.said}}"},
    },
    {"kind": "rule", "when": {"observation": "(?P<said>as it was \\w+)"}, "reply": {"text": "it ran {{match.said}}"}},
]
ITEMS = ("changed", "refused", "later", "never")


class Harness:
    """A user's shell whose environment names the shared stack and a model server."""

    def __init__(self, stack: Stack, footprint: Footprint, server: ModelServer, folder: Path) -> None:
        self.folder = folder
        self._footprint = footprint
        self.output = folder / "out.jsonl"
        self.environment = {
            "TOOLCREW_REDIS_URL": stack.redis_url,
            "TOOLCREW_TRACES": str(folder / "traces"),
            **server.environment(),
        }

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        result = self._footprint.environment({**self.environment, **environment})
        with (self.folder / "said").open("ab") as log_file:
            return subprocess.Popen(
                [TOOLCREW, *arguments], env=result, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file
            )

    def toolcrew(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run_toolcrew(self._footprint, *arguments, environment=self.environment, within_s=100)

    def pending_questions(self) -> dict[str, dict[str, Any]]:
        """Return the waiting questions by item. The list is read in this process, because each poll through a command
        would take a second.
        """
        result = CliRunner().invoke(app, ["approvals", "list", "--json"], env=self.environment)
        assert result.exit_code == 0, result.output
        questions = {question["run"]: question for question in json.loads(result.stdout)["approvals"]}
        runs = {run_id("default", "asking", item): item for item in ITEMS}
        return {runs[run]: question for run, question in questions.items() if run in runs}

    def answers(self) -> dict[str, str]:
        rows = self.output.read_text().splitlines() if self.output.exists() else []
        return {row["custom_id"]: row["response"]["body"]["answer"] for row in map(json.loads, rows)}

    def output_so_far(self) -> str:
        return (self.folder / "said").read_text()


@pytest.fixture
def harness(stack: Stack, footprint: Footprint, tmp_path: Path) -> Iterator[Harness]:
    with running_model_server(SCRIPT) as server:
        yield Harness(stack, footprint, server, tmp_path)


def test_approvals_decided_by_other_processes_apply_after_the_batch_resumes(harness: Harness) -> None:
    lines = harness.folder / "in.jsonl"
    lines.write_text("".join(json.dumps({"id": item, "instruction": f"[item {item}] act"}) + "\n" for item in ITEMS))
    other = harness.folder / "arguments.json"
    other.write_text(json.dumps({"command": "echo as it was changed"}))
    arguments = ("batches", "submit", str(lines), "--ask", "--output", str(harness.output), "--id", "asking")
    first = harness.start(*arguments)
    try:
        wait_until(lambda: set(harness.pending_questions()) == set(ITEMS), 100, harness.output_so_far)
        waiting = harness.pending_questions()
        assert waiting["changed"]["command"] == RISKY
        assert "removes" in waiting["changed"]["warning"]
        assert (
            harness.toolcrew(
                "approvals", "decide", waiting["changed"]["id"], "allow", "--arguments", f"@{other}"
            ).returncode
            == 0
        )
        assert (
            harness.toolcrew(
                "approvals", "decide", waiting["refused"]["id"], "deny", "--reason", "not on my watch"
            ).returncode
            == 0
        )
        wait_until(lambda: set(harness.answers()) == {"changed", "refused"}, SOON_S, harness.output_so_far)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert harness.toolcrew("approvals", "decide", waiting["later"]["id"], "allow").returncode == 0
    # The resumed batch uses a shorter timeout.
    second = harness.start("batches", "resume", "asking", "--output", str(harness.output), TOOLCREW_APPROVAL_WAIT_S="2")
    assert second.wait(200) == 0, harness.output_so_far()
    answers = harness.answers()
    assert answers["changed"] == "it ran as it was changed"
    assert "not on my watch" in answers["refused"]
    assert answers["later"] == "it ran as it was asked"
    assert "no approver answered within 2 s" in answers["never"]
    assert harness.pending_questions() == {}
    late = harness.toolcrew("approvals", "decide", waiting["never"]["id"], "allow")
    assert (late.returncode, "the question has been closed since" in late.stderr) == (1, True)
    reply = json.loads(harness.toolcrew("changes", "list", "--json", "--tenant", "default").stdout)["changes"]
    mine = {question["id"] for question in waiting.values()}
    assert [entry["action"] for entry in reply if entry["target"] in mine] == [
        "approval.allow",
        "approval.deny",
        "approval.allow",
    ]
