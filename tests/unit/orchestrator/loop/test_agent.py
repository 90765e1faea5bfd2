"""The agent loop: replies that are no answer, and the cleanup of everything that runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support.records.builders import build_spec
from tests.support.records.fakes import StreamModel
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ModelUnavailable
from toolcrew.contract.run_events import RunEvent, Warned
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.scripted import Raw, ScriptedModel

RunCall = Callable[[ToolCall], Awaitable[ToolResult]]


async def run_nothing(call: ToolCall) -> ToolResult:
    raise AssertionError(f"{call.name} was called")


async def work(
    model: Model,
    *,
    run_call: RunCall = run_nothing,
    dialect: Dialect | None = None,
    events: list[RunEvent] | None = None,
) -> RunResult:
    agent = Agent(
        model,
        dialect or NativeDialect(),
        [build_spec("echo")],
        run_call,
        instruction="Be brief.",
        on_event=(events if events is not None else []).append,
        run_id="r1",
    )
    async with asyncio.timeout(SOON_S):
        return await agent.run("do it")


def text_chunk(text: str, finish_reason: str | None = None) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def tasks_left() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


@pytest.mark.parametrize("reply", ["", " \n", Raw([]), Raw([{"choices": []}])])
async def test_empty_or_cut_reply_has_its_own_stop_reason(reply: Any) -> None:
    events: list[RunEvent] = []
    result = await work(ScriptedModel([reply]), events=events)
    assert result.stop_reason is StopReason.EMPTY_REPLY
    assert any(isinstance(event, Warned) for event in events)
    cut = await work(ScriptedModel([Raw([text_chunk("half an ans", "length")])]))
    assert (cut.stop_reason, cut.answer) == (StopReason.CUT_REPLY, "half an ans")


async def test_cancel_during_a_call_leaves_no_task_and_closes_the_stream() -> None:
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


async def test_stream_that_raises_cancelled_error_does_not_hang_the_run() -> None:
    async def cancelling(_: ModelRequest) -> AsyncIterator[Chunk]:
        yield text_chunk("half")
        raise asyncio.CancelledError

    with pytest.raises((asyncio.CancelledError, ModelUnavailable)):
        async with asyncio.timeout(0.5):
            await work(StreamModel(cancelling))
