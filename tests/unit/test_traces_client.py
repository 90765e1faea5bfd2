"""Events that a client's run adds to its trace, in addition to the loop's own events."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contract.masking import Masker
from contract.run_events import CallFinished, CallSent, CallStarted, RunEvent, RunStarted, SandboxReady
from orchestrator.models.scripted import Calls, ScriptedModel
from orchestrator.sdk.client import ToolClient
from orchestrator.traces.reading import load_trace
from orchestrator.traces.recorder import open_trace
from tests.builders import build_spec
from tests.conftest import RedisProcess
from tests.switched_pool import SESSION, SwitchedPool
from workers.tools.base import Outcome, ToolEnvironment, WorkerTool


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator[ToolClient]:
    def say(arguments: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        return Outcome(str(arguments.get("text")))

    async with SwitchedPool(redis_server, WorkerTool(build_spec("say"), say)).client() as opened:
        yield opened


async def test_a_trace_has_the_sandbox_and_each_sent_call(client: ToolClient, tmp_path: Path) -> None:
    events: list[RunEvent] = []
    model = ScriptedModel([Calls([("say", {"text": "a"})]), "ok"])
    await client.run("go", session=await client.open_session(), model=model, on_event=events.append, shows_output=False)
    kinds = [type(event) for event in events]
    assert kinds.index(SandboxReady) < kinds.index(RunStarted)
    assert [kind for kind in kinds if kind in (CallStarted, CallSent, CallFinished)] == [
        CallStarted,
        CallSent,
        CallFinished,
    ]
    with open_trace(tmp_path, "acme", events[0].run, masker=Masker()) as trace:
        for event in events:
            trace(event)
    read = load_trace(trace.path)
    assert (read.faults(), [type(event) for event in read.events[:2]]) == ([], [RunStarted, SandboxReady])
    assert (read.session, [call.arguments for call in read.calls]) == (SESSION, [{"text": "a"}])
