"""`toolcrew run --checkpoint`: a checkpoint that could not be stored is refused or reported."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.session_views import Checkpoint
from toolcrew.orchestrator.cli.run import WorkspaceSaver
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.store.run_records import DurableRun, RunEnd


@pytest.mark.parametrize("name", ["TOOLCREW_REDIS_URL", "TOOLCREW_WORKSPACE_STORE"])
def test_a_checkpoint_without_a_permanent_store_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TOOLCREW_REDIS_URL", "TOOLCREW_WORKSPACE_STORE"):
        monkeypatch.delenv(variable, raising=False)
    result = CliRunner().invoke(app, ["run", "hello", "--model", "scripted", "--checkpoint"])
    assert (result.exit_code, name in result.stderr) == (1, True)


class FailingSession:
    """Returns the scripted result, or raises the scripted exception."""

    id, tenant = "s1", "default"

    def __init__(self, checkpoint: Any, export: Any) -> None:
        self._answers = {"checkpoint": checkpoint, "export": export}

    async def checkpoint(self) -> Any:
        return self._answer("checkpoint")

    async def export(self, _: Path) -> Any:
        return self._answer("export")

    def _answer(self, name: str) -> Any:
        answer = self._answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


STORED = Checkpoint(id="c1", bytes=10, sha256="0" * 64)
FULL = ToolFailure(ErrorCode.NO_SPACE, "100 checkpoints")


@pytest.mark.parametrize(
    ("session", "expected", "code"),
    [
        (FailingSession(STORED, []), ["checkpoint c1 (10 bytes)"], None),
        (FailingSession(STORED, ["link"]), ["checkpoint c1", "not copied", "link"], None),
        (FailingSession(FULL, ["link"]), ["not copied", "100 checkpoints"], "NO_SPACE"),
        (FailingSession(STORED, SandboxUnavailable("gone")), ["checkpoint c1", "gone"], "SANDBOX_UNAVAILABLE"),
        (
            FailingSession(STORED, NotADirectoryError(20, "Not a directory")),
            ["checkpoint c1", "give another folder"],
            "CONFIG_MISSING",
        ),
    ],
)
async def test_a_failed_checkpoint_or_export_is_reported(session: Any, expected: list[str], code: str | None) -> None:
    saver = WorkspaceSaver(Path("copy"), wants_checkpoint=True)
    await saver.save(session)
    text = "\n".join(saver.lines())
    assert [fragment for fragment in expected if fragment not in text] == []
    assert saver.to_json().get("error", {}).get("code") == code


def test_a_run_with_a_failed_checkpoint_prints_its_answer_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    end = RunEnd(answer="42", stop_reason=StopReason.ANSWERED.value, steps=1)
    result = DurableRun(
        id="r", tenant="default", state=DurableRunState.SUCCEEDED, instruction="hello", created_at=1.0, end=end
    )

    @asynccontextmanager
    async def open_client(_: str | None = None) -> AsyncIterator[Any]:
        yield FakeClient(result)

    monkeypatch.setattr("toolcrew.orchestrator.cli.run.open_tenant_client", open_client)
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://127.0.0.1:1/0")
    text_result = CliRunner().invoke(app, ["run", "hello", "--checkpoint"])
    assert (text_result.exit_code, text_result.stdout, "100 checkpoints" in text_result.stderr) == (1, "42\n", True)
    reply = json.loads(CliRunner().invoke(app, ["run", "hello", "--checkpoint", "--json"]).stdout)
    assert (reply["answer"], reply["error"]["code"], "checkpoint" in reply) == ("42", "NO_SPACE", False)


class FakeClient:
    """Answers every run with one result, in a session that stores nothing."""

    def __init__(self, result: DurableRun) -> None:
        self._result = result
        self.run_views = self

    async def open_session_from(self, *_: object, **__: object) -> Any:
        session = FailingSession(FULL, [])

        @asynccontextmanager
        async def open_fake() -> AsyncIterator[Any]:
            yield session

        return open_fake()

    async def execute(self, *_: object) -> DurableRun:
        return self._result

    async def transcript(self, _: str) -> list[dict[str, Any]]:
        return []
