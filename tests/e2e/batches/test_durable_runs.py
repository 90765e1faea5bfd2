"""Runs that a program starts on a real pool: followed during execution, in an open session, cancelled during
execution, and inspected by commands.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.model_server.running import running_model_server
from tests.support.stack.stack import Stack
from toolcrew.contract.run_spec import ItemEnvironment
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.runs.batch_service import BatchService
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.run_records import DurableRun

pytestmark = pytest.mark.stack


def bash(run: str, command: str) -> dict[str, Any]:
    call = {"name": "bash_tool", "arguments": {"command": command}}
    return {"kind": "rule", "when": {"conversation": run, "step": 0}, "reply": {"calls": [call]}}


SCRIPT = [
    bash("own", "echo first; sleep 2; echo more"),
    bash("shared", "cat mark"),
    bash("stopped", "echo begun; sleep 301"),
    {"kind": "rule", "when": {"observation": "(?P<said>a mark|more)"}, "reply": {"text": "it said {{match.said}}"}},
]


@pytest.fixture
def environment(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with running_model_server(SCRIPT) as server:
        variables = {"TOOLCREW_REDIS_URL": stack.redis_url, "TOOLCREW_TRACES": str(tmp_path), **server.environment()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


@asynccontextmanager
async def serving() -> AsyncIterator[ToolClient]:
    """Yield a client, while an orchestrator executes the runs of the client."""
    service = BatchService(load_settings(), concurrency=4, has_traces=False)
    working = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(120), ToolClient.connect() as client:
            yield client
    finally:
        service.interrupt()
        service.interrupt()
        await working


async def wait_for_event(client: ToolClient, run: str, kind: str, word: str) -> None:
    """Wait until an event of this kind with `word` in its content has arrived."""
    async for _, text in client.runs.follow(run):
        if json.loads(text)["type"] == kind and word in text:
            return


async def wait_ended(client: ToolClient, run: str) -> DurableRun:
    async for _ in client.runs.follow(run):
        pass
    return await client.runs.get(run)


async def open_session_with_orchestrator() -> tuple[str, str]:
    async with serving() as client, await client.open_session() as session:
        await session.write_file("mark", b"a mark")
        own = await client.runs.start("[item own] act", metadata={"for": "a test"})
        await wait_for_event(client, own.id, "OutputArrived", "first")
        assert (await client.runs.get(own.id)).state is DurableRunState.RUNNING
        shared = await client.runs.start("[item shared] act", environment=ItemEnvironment(session=session.id))
        assert (await wait_ended(client, shared.id)).end.answer == "it said a mark"  # type: ignore[union-attr]
        stopped = await client.runs.start("[item stopped] act", environment=ItemEnvironment(session=session.id))
        await wait_for_event(client, stopped.id, "OutputArrived", "begun")
        await client.runs.cancel(stopped.id)
        assert (await wait_ended(client, stopped.id)).state is DurableRunState.CANCELLED
        # The session is unchanged, and the programs that the run had started there have ended.
        files = await session.call(
            "bash_tool", {"command": "for _ in $(seq 50); do pgrep -f '[s]leep 301' || exit 0; sleep 0.1; done; exit 1"}
        )
        assert files.metadata["exit_code"] == 0, files.output
        found = await wait_ended(client, own.id)
        assert found.state is DurableRunState.SUCCEEDED
        return own.id, stopped.id


def toolcrew(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["runs", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_runs_are_followed_share_sessions_and_are_cancelled(environment: None) -> None:
    own, stopped = asyncio.run(open_session_with_orchestrator())
    listed = json.loads(toolcrew("list", "--json"))["runs"]
    assert {own, stopped} <= {run["id"] for run in listed}
    assert stopped in toolcrew("list", "--state", "cancelled")
    assert own not in toolcrew("list", "--state", "cancelled")
    shown = json.loads(toolcrew("show", own, "--transcript", "--json"))
    assert (shown["answer"], shown["metadata"]) == ("it said more", {"for": "a test"})
    assert [message["role"] for message in shown["transcript"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert "it said more" in toolcrew("show", own, "--transcript")
    lines = toolcrew("show", own, "-f").splitlines()
    assert "RunEnded" in lines[-1]
    events = [json.loads(line) for line in toolcrew("show", own, "--events", "--json").splitlines()]
    assert [event["type"] for event in events][-1] == "RunEnded"
    assert len(events) == len(lines)
    assert f"{stopped} cancelled" in toolcrew("cancel", stopped)
    unknown = CliRunner().invoke(app, ["runs", "show", "nosuch"])
    assert unknown.exit_code == 1
    assert "run nosuch was not found" in unknown.output
