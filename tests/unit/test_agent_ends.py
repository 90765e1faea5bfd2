"""Ends of a run without an answer: the contents of the record, the counts of the budgets, and the exceptions raised."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from contract.calls import Clocks, ToolCall, ToolResult
from contract.errors import ContextWindowExceeded
from contract.model_endpoints import Prices
from contract.run_events import CallFinished, RunEvent, Warned
from orchestrator.dialects.base import Dialect, Usage
from orchestrator.dialects.model import Chunk, Message, Model, ModelRequest
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.tags import TagsDialect
from orchestrator.loop.agent import Agent, RunResult
from orchestrator.loop.limits import ReActOptions, StopReason
from orchestrator.models.openai import OpenAIModel
from orchestrator.models.scripted import Calls, Raw, ScriptedModel
from tests.builders import build_spec
from tests.fakes import StreamModel
from tests.model_endpoint import HELLO, stream

SOON_S = 10.0
WALL_S = 0.2
SPECS = [build_spec("echo"), build_spec("read", read_only=True)]


def agent(
    model: Model, run_call: Callable[[ToolCall], Awaitable[ToolResult]], dialect: Dialect | None = None, **fields: Any
) -> Agent:
    return Agent(model, dialect or NativeDialect(), SPECS, run_call, **fields)


async def work(one: Agent, **fields: Any) -> RunResult:
    async with asyncio.timeout(SOON_S):
        return await one.run("do it", **fields)


async def run_or_hang(call: ToolCall) -> ToolResult:
    """Hang if the text is `hang`."""
    if call.arguments.get("text") == "hang":
        await asyncio.Event().wait()
    return ToolResult(
        call_id=call.id,
        name=call.name,
        success=True,
        output=f"did {call.arguments.get('text')}",
        clocks=Clocks(run_s=1),
    )


def chunk(text: str = "", finish: str | None = None, **delta: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]}


def unanswered(messages: list[Message]) -> list[str]:
    """Return the ids of native calls that no tool message answers."""
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    return [
        entry["id"] for message in messages for entry in message.get("tool_calls", ()) if entry["id"] not in answered
    ]


# The wall limit in the middle of a step


@pytest.mark.parametrize("tool", ["echo", "read"], ids=["one after another", "side by side"])
async def test_calls_that_ran_before_the_wall_limit_stay_in_the_transcript(tool: str) -> None:
    events: list[RunEvent] = []
    model = ScriptedModel(
        [Calls([(tool, {"text": "a"}), (tool, {"text": "hang"}), ("echo", {"text": "c"})], "Working.")]
    )
    result = await work(agent(model, run_or_hang, options=ReActOptions(max_wall_s=WALL_S), on_event=events.append))
    assert result.stop_reason is StopReason.MAX_WALL
    entries = [message["content"] for message in result.transcript if message["role"] == "tool"]
    assert entries[0] == "did a"
    assert "may or may not have acted" in entries[1]
    assert "was not run" in entries[2]
    assert unanswered(result.transcript.messages()) == []
    assert (result.usage, result.clocks.run_s) == (Usage(1, len("Working.")), 1)
    assert [event.result.success for event in events if isinstance(event, CallFinished)] == [True, False, False]


async def test_a_native_call_that_was_half_read_at_the_wall_limit_has_its_answer_too() -> None:
    tag = '<tool_action name="echo"><text value="hang" /></tool_action>'
    entry = {"index": 0, "id": "c", "function": {"name": "echo", "arguments": "{"}}

    async def stream(_: ModelRequest) -> AsyncIterator[Chunk]:
        yield chunk(tag, tool_calls=[entry])
        await asyncio.Event().wait()

    one = agent(StreamModel(stream), run_or_hang, TagsDialect(), options=ReActOptions(max_wall_s=WALL_S))
    assert unanswered((await work(one)).transcript.messages()) == []


async def test_a_wall_limit_releases_the_connection_to_the_model() -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(stream(HELLO, done=False).replace(b"connection: close\r\n", b""))
        while await reader.read(1000):
            pass
        released.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        model = OpenAIModel("m", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key", SOON_S)
        result = await work(agent(model, run_or_hang, options=ReActOptions(max_wall_s=1)))
        assert result.stop_reason is StopReason.MAX_WALL
        await asyncio.wait_for(released.wait(), SOON_S)
        await model.aclose()


# Servers that do not count


def uncounted(_: Any) -> Raw:
    entry = {"index": 0, "id": "c", "function": {"name": "echo", "arguments": "{}"}}
    return Raw([chunk("word " * 200, tool_calls=[entry]), chunk("", "tool_calls")])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 1000}, StopReason.MAX_TOKENS),
        ({"max_cost": 0.001, "prices": Prices(1.0, 1.0)}, StopReason.MAX_COST),
    ],
    ids=["tokens", "cost"],
)
async def test_a_server_that_does_not_count_makes_no_budget_endless(
    options: dict[str, Any], reason: StopReason
) -> None:
    events: list[RunEvent] = []
    one = agent(
        ScriptedModel(uncounted),
        run_or_hang,
        options=ReActOptions(max_iterations=50, **options),
        on_event=events.append,
    )
    result = await work(one)
    assert (result.stop_reason, result.usage) == (reason, Usage())
    assert result.steps < 5
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert sum("does not count tokens" in warning for warning in warnings) == 1


# What is raised


async def test_a_run_id_is_good_for_one_run() -> None:
    one = agent(ScriptedModel(["a", "b"]), run_or_hang, run_id="r1")
    await work(one)
    with pytest.raises(ValueError, match="'r1' has already started"):
        await work(one)


@pytest.mark.parametrize("tool", ["echo", "read"], ids=["one after another", "side by side"])
async def test_what_the_observer_raises_comes_out_as_it_is(tool: str) -> None:
    def observe(event: RunEvent) -> None:
        if isinstance(event, CallFinished):
            raise BrokenPipeError("no reader")

    with pytest.raises(BrokenPipeError):
        await work(agent(ScriptedModel([Calls([(tool, {}), (tool, {})])]), run_or_hang, on_event=observe))


@pytest.mark.parametrize("tool", ["echo", "read"], ids=["one after another", "side by side"])
async def test_a_tool_whose_own_work_was_cancelled_fails_and_the_run_goes_on(tool: str) -> None:
    async def run_call(call: ToolCall) -> ToolResult:
        if call.arguments["text"] == "b":
            return await run_or_hang(call)
        raise asyncio.CancelledError

    model = ScriptedModel([Calls([(tool, {"text": "a"}), (tool, {"text": "b"})]), "It failed."])
    result = await work(agent(model, run_call))
    assert result.answer == "It failed."
    assert "CancelledError" in model.requests[1].messages[-2]["content"]
    assert model.requests[1].messages[-1]["content"] == "did b"


# History


async def test_history_as_programs_keep_it_is_taken() -> None:
    history: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi.", "tool_calls": None},
        {"role": "tool", "tool_call_id": "gone", "content": "an old result"},
        {"role": "tool", "content": "another"},
    ]
    model = ScriptedModel(["ok"])
    assert (await work(agent(model, run_or_hang), history=history)).answer == "ok"
    assert [message["role"] for message in model.requests[0].messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert "an old result" in model.requests[0].messages[3]["content"]


# Refusals in the middle


async def test_a_refusal_behind_a_call_that_has_run_does_not_run_it_again() -> None:
    tag = '<tool_action name="echo"><text value="a" /></tool_action>'
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return await run_or_hang(call)

    async def refusing(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 3:
            yield chunk("Done.", "stop")
            return
        yield chunk(tag)
        raise ContextWindowExceeded("too long", 10)

    result = await work(agent(StreamModel(refusing), run_call, TagsDialect()))
    assert (result.answer, len(calls)) == ("Done.", 1)
