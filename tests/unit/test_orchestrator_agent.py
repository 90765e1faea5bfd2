"""The agent loop: the order of requests, calls and messages, the end of a run, and the cleanup of everything that
runs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from contract.calls import Clocks, ToolCall, ToolResult
from contract.errors import ErrorCode, ModelUnavailable
from contract.run_events import (
    RunEvent,
    Warned,
)
from orchestrator.dialects.base import Dialect
from orchestrator.dialects.model import Chunk, Model, ModelRequest
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.tags import TagsDialect
from orchestrator.loop.agent import Agent, RunResult
from orchestrator.loop.limits import ReActOptions, StopReason
from orchestrator.models.scripted import Calls, Raw, ScriptedModel
from tests.builders import build_spec
from tests.fakes import StreamModel

SOON_S = 10.0
RunCall = Callable[[ToolCall], Awaitable[ToolResult]]


class Tools:
    """Runs every call at once and records it."""

    def __init__(self, fail: ErrorCode | None = None) -> None:
        self.calls: list[ToolCall] = []
        self._fail = fail

    async def run(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        if self._fail is not None:
            return ToolResult.failed(call, self._fail, "it did not work")
        clocks = Clocks(queued_s=1, sandbox_s=2, run_s=3, transfer_s=4)
        return ToolResult(
            call_id=call.id, name=call.name, success=True, output=f"did {call.arguments.get('text')}", clocks=clocks
        )


async def work(
    model: Model,
    *,
    run_call: RunCall | None = None,
    dialect: Dialect | None = None,
    events: list[RunEvent] | None = None,
    **options: Any,
) -> RunResult:
    agent = Agent(
        model,
        dialect or NativeDialect(),
        [build_spec("echo")],
        run_call or Tools().run,
        instruction="Be brief.",
        options=ReActOptions(**options),
        on_event=(events if events is not None else []).append,
        run_id="r1",
    )
    async with asyncio.timeout(SOON_S):
        return await agent.run("do it")


def echo(text: str) -> Calls:
    return Calls([("echo", {"text": text})])


def text_chunk(text: str, finish_reason: str | None = None) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def tasks_left() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


# Answering and calling


async def test_a_malformed_call_among_good_ones_does_not_stop_them() -> None:
    model, tools = (
        ScriptedModel([Calls([("echo", {"text": "a"}), ("echo", "["), ("echo", {"text": "c"})]), "done"]),
        Tools(),
    )
    await work(model, run_call=tools.run)
    contents = [message["content"] for message in model.requests[1].messages[-3:]]
    assert [call.arguments["text"] for call in tools.calls] == ["a", "c"]
    assert (contents[0], contents[1][:5], contents[2]) == ("did a", "Error", "did c")


# Stopping


@pytest.mark.parametrize("reply", ["", " \n", Raw([]), Raw([{"choices": []}])])
async def test_an_empty_reply_is_no_answer(reply: Any) -> None:
    events: list[RunEvent] = []
    result = await work(ScriptedModel([reply]), events=events)
    assert result.stop_reason is StopReason.EMPTY_REPLY
    assert any(isinstance(event, Warned) for event in events)


async def test_a_reply_cut_by_the_server_stops_the_run() -> None:
    result = await work(ScriptedModel([Raw([text_chunk("half an ans", "length")])]))
    assert (result.stop_reason, result.answer) == (StopReason.CUT_REPLY, "half an ans")


async def test_a_wall_clock_budget_ends_what_is_running_and_keeps_the_last_reply() -> None:
    ended = asyncio.Event()

    async def endless(call: ToolCall) -> ToolResult:
        if call.arguments["text"] == "a":
            return await Tools().run(call)
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            ended.set()

    before, events = tasks_left(), []
    model = ScriptedModel([Calls([("echo", {"text": "a"})], "Working."), echo("b")])
    result = await work(model, run_call=endless, max_wall_s=0.2, events=events)
    assert (result.stop_reason, result.answer, result.steps) == (StopReason.MAX_WALL, "Working.", 2)
    assert ended.is_set()
    assert any(isinstance(event, Warned) for event in events)
    assert tasks_left() == before


# Events


# Streams


async def test_the_stream_is_read_on_while_a_tool_runs() -> None:
    read_to_end = asyncio.Event()

    async def stream(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 2:
            yield text_chunk("done", "stop")
            return
        yield text_chunk('<tool_action name="echo"><text value="a" /></tool_action>')
        yield text_chunk(" and more", "stop")
        read_to_end.set()

    async def run_call(call: ToolCall) -> ToolResult:
        # Without read-ahead, the stream blocks until this returns, which would never happen.
        await asyncio.wait_for(read_to_end.wait(), SOON_S / 2)
        return ToolResult(call_id=call.id, name=call.name, success=True, output="x")

    result = await work(StreamModel(stream), run_call=run_call, dialect=TagsDialect())
    assert result.answer == "done"


async def test_cancelling_in_the_middle_of_a_call_leaves_no_task_and_closes_the_stream() -> None:
    calling, closed = asyncio.Event(), asyncio.Event()

    async def stream(_: ModelRequest) -> AsyncIterator[Chunk]:
        try:
            yield text_chunk('<tool_action name="echo"></tool_action>')
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def run_call(_: ToolCall) -> ToolResult:
        calling.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    before = tasks_left()
    running = asyncio.create_task(work(StreamModel(stream), run_call=run_call, dialect=TagsDialect()))
    await calling.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tasks_left(), closed.is_set()) == (before, True)


async def test_a_stream_that_cancels_itself_does_not_hang_the_run() -> None:
    async def cancelling(_: ModelRequest) -> AsyncIterator[Chunk]:
        yield text_chunk("half")
        raise asyncio.CancelledError

    with pytest.raises((asyncio.CancelledError, ModelUnavailable)):
        async with asyncio.timeout(0.5):
            await work(StreamModel(cancelling))
