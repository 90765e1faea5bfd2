"""Runs of the agent loop on the real pool, with a scripted model: every dialect, parallel calls, and limits and
cancels that reach the sandbox.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.model_endpoint import END, HELLO, serving, stream
from tests.support.stack.stack import Stack, commands_in
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.model_endpoints import ModelEndpoint
from toolcrew.contract.run_events import CallFinished, CallStarted, RunEvent
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dialects.tags import build_tag_call
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.scripted import Calls, Reply, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.model_endpoints import ModelEndpoints

pytestmark = pytest.mark.stack


def decision(command: str) -> str:
    return json.dumps({"tool": "bash_tool", "arguments": {"command": command}})


WRITERS: dict[str, Callable[[str], Reply]] = {
    "native": lambda command: Calls([("bash_tool", {"command": command})]),
    "tags": lambda command: "I look. " + build_tag_call("bash_tool", {"command": command}) + " Done.",
    "json": decision,
}


def answer(messages: list[Message]) -> Reply:
    text = str(messages[-1]["content"])
    return json.dumps({"tool": None, "reply": text}) if text.startswith("[Tool result for") else text


@pytest.mark.parametrize("dialect", WRITERS)
async def test_a_run_in_every_dialect_sends_its_call_to_a_sandbox_and_reads_the_result(
    client: ToolClient, dialect: str, tmp_path: Path
) -> None:
    (tmp_path / "data.csv").write_text("a\nb\nc\n")
    model = ScriptedModel([WRITERS[dialect]("wc -l < /workspace/data.csv"), answer])
    result = await client.run("How many lines?", workspace=tmp_path, model=model, dialect=dialect)
    assert (result.stop_reason, result.answer.strip().splitlines()[-1]) == (StopReason.ANSWERED, "3")
    assert result.clocks.run_s > 0


async def test_a_run_at_a_configured_endpoint_is_charged_by_its_prices(client: ToolClient, session: Session) -> None:
    arguments = json.dumps({"command": "expr 40 + 2"})
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "bash_tool", "arguments": arguments}}
    usage = {"choices": [], "usage": {"prompt_tokens": 500_000, "completion_tokens": 250_000}}
    calls = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    endpoints = ModelEndpoints(client._pool.redis, client._settings.deployment, client._pool.keys)
    async with serving([stream(calls, usage), stream(HELLO, END, usage)]) as server:
        prices = {"prompt_price": 2.0, "completion_price": 4.0}
        endpoint = ModelEndpoint(base_url=server.url, model="m-70b", concurrency=1, context_tokens=100_000, **prices)
        await endpoints.set("priced", endpoint)
        result = await client.run("add", session=session, model="priced", dialect="native")
        assert server.bodies[1]["messages"][-1]["content"].strip() == "42"
    assert (result.stop_reason, result.cost) == (StopReason.ANSWERED, pytest.approx(4.0))
    assert await endpoints.remove("priced")


async def test_read_only_calls_of_one_reply_run_in_parallel_in_one_sandbox(
    client: ToolClient, session: Session
) -> None:
    for number in range(4):
        await session.write_file(f"/workspace/{number}.txt", f"this is {number}".encode())
    calls: list[tuple[str, dict[str, Any] | str]] = [
        ("read_tool", {"path": f"/workspace/{number}.txt"}) for number in range(4)
    ]
    events: list[RunEvent] = []
    model = ScriptedModel([Calls(calls), "ok"])
    await client.run("read", session=session, model=model, on_event=events.append)
    kinds = [type(event) for event in events if isinstance(event, CallStarted | CallFinished)]
    assert kinds == [CallStarted] * 4 + [CallFinished] * 4
    entries = [message["content"] for message in model.requests[1].messages[-4:]]
    assert [f"this is {number}" in content for number, content in enumerate(entries)] == [True] * 4


async def test_a_wall_clock_limit_ends_the_command_in_the_sandbox(
    client: ToolClient, stack: Stack, session: Session
) -> None:
    info = await session.info()
    assert info.sandbox is not None
    container = info.sandbox.id
    model = ScriptedModel([Calls([("bash_tool", {"command": "setsid sleep 98 & sleep 98"})], "Working.")])
    result = await client.run("wait", session=session, model=model, options=ReActOptions(max_wall_s=2))
    assert (result.stop_reason, result.answer) == (StopReason.MAX_WALL, "")
    await wait_until_async(lambda: "sleep 98" not in commands_in(container).values(), SOON_S, "the command is gone")


async def test_a_cancelled_run_leaves_no_command_and_a_usable_session(
    client: ToolClient, stack: Stack, session: Session
) -> None:
    info = await session.info()
    assert info.sandbox is not None
    container = info.sandbox.id
    model = ScriptedModel([Calls([("bash_tool", {"command": "setsid sleep 97 & sleep 97"})])])
    run = asyncio.create_task(client.run("wait", session=session, model=model))
    await wait_until_async(lambda: "sleep 97" in commands_in(container).values(), SOON_S, "the command runs")
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run
    await wait_until_async(lambda: "sleep 97" not in commands_in(container).values(), SOON_S, "the command is gone")
    assert (await session.call("bash_tool", {"command": "echo still here"})).output == "still here\n"
