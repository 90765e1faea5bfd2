"""Ends of a run without an answer: the contents of the record, the counts of the budgets, and the exceptions raised."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.support.models.model_endpoint import HELLO, stream
from tests.support.records.builders import build_spec
from tests.support.records.fakes import StreamModel
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import Clocks, ToolCall, ToolResult
from toolcrew.contract.errors import ContextWindowExceeded, ModelInterrupted
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.run_events import CallFinished, RunEvent, TextArrived, TextWithdrawn, Warned
from toolcrew.orchestrator.dialects.base import Dialect, TokenUsage
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk, Message, Model, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.reader import MAX_CALLS
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel

WALL_S = 0.2
TAG = '<tool_action name="echo"><text value="a" /></tool_action>'
EACH_DIALECT = pytest.mark.parametrize(
    "dialect", [NativeDialect(), TagsDialect(), JsonDecisionDialect()], ids=["native", "tags", "json"]
)
SEQUENTIAL_AND_PARALLEL = pytest.mark.parametrize("tool", ["echo", "read"], ids=["sequential", "parallel"])
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


@SEQUENTIAL_AND_PARALLEL
async def test_calls_finished_before_the_wall_limit_stay_in_the_transcript(tool: str) -> None:
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
    assert (result.usage, result.clocks.run_s) == (TokenUsage(1, len("Working.")), 1)
    assert [event.result.success for event in events if isinstance(event, CallFinished)] == [True, False, False]


async def test_a_half_received_native_call_at_the_wall_limit_gets_a_tool_message() -> None:
    tag = '<tool_action name="echo"><text value="hang" /></tool_action>'
    entry = {"index": 0, "id": "c", "function": {"name": "echo", "arguments": "{"}}

    async def stream(_: ModelRequest) -> AsyncIterator[Chunk]:
        yield chunk(tag, tool_calls=[entry])
        await asyncio.Event().wait()

    one = agent(StreamModel(stream), run_or_hang, TagsDialect(), options=ReActOptions(max_wall_s=WALL_S))
    assert unanswered((await work(one)).transcript.messages()) == []


async def test_the_wall_limit_closes_the_connection_to_the_model() -> None:
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


def reply_without_usage(_: Any) -> Raw:
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
async def test_budgets_apply_when_the_server_reports_no_token_usage(
    options: dict[str, Any], reason: StopReason
) -> None:
    events: list[RunEvent] = []
    one = agent(
        ScriptedModel(reply_without_usage),
        run_or_hang,
        options=ReActOptions(max_iterations=50, **options),
        on_event=events.append,
    )
    result = await work(one)
    assert (result.stop_reason, result.usage) == (reason, TokenUsage())
    assert result.steps < 5
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert sum("does not count tokens" in warning for warning in warnings) == 1


async def test_a_run_id_cannot_start_a_second_run() -> None:
    one = agent(ScriptedModel(["a", "b"]), run_or_hang, run_id="r1")
    await work(one)
    with pytest.raises(ValueError, match="'r1' has already started"):
        await work(one)


@SEQUENTIAL_AND_PARALLEL
async def test_an_exception_of_the_event_listener_propagates_unchanged(tool: str) -> None:
    def observe(event: RunEvent) -> None:
        if isinstance(event, CallFinished):
            raise BrokenPipeError("no reader")

    with pytest.raises(BrokenPipeError):
        await work(agent(ScriptedModel([Calls([(tool, {}), (tool, {})])]), run_or_hang, on_event=observe))


@SEQUENTIAL_AND_PARALLEL
async def test_a_tool_that_raises_cancelled_error_fails_without_ending_the_run(tool: str) -> None:
    async def run_call(call: ToolCall) -> ToolResult:
        if call.arguments["text"] == "b":
            return await run_or_hang(call)
        raise asyncio.CancelledError

    model = ScriptedModel([Calls([(tool, {"text": "a"}), (tool, {"text": "b"})]), "It failed."])
    result = await work(agent(model, run_call))
    assert result.answer == "It failed."
    assert "CancelledError" in model.requests[1].messages[-2]["content"]
    assert model.requests[1].messages[-1]["content"] == "did b"


async def test_history_with_null_and_unmatched_tool_messages_is_accepted() -> None:
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


async def test_a_context_window_error_after_a_call_does_not_repeat_the_call() -> None:
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return await run_or_hang(call)

    async def stream(request: ModelRequest) -> AsyncIterator[Chunk]:
        if len(request.messages) > 3:
            yield chunk("Done.", "stop")
            return
        yield chunk(TAG)
        raise ContextWindowExceeded("too long", 10)

    result = await work(agent(StreamModel(stream), run_call, TagsDialect()))
    assert (result.answer, len(calls)) == ("Done.", 1)


class Harness:
    """A run, with everything that is visible from outside."""

    def __init__(self, model: Model, dialect: Dialect | None = None, **options: Any) -> None:
        self.calls: list[ToolCall] = []
        self.events: list[RunEvent] = []
        self._agent = Agent(
            model,
            dialect or NativeDialect(),
            [build_spec("echo")],
            self._run,
            options=ReActOptions(**options),
            on_event=self.events.append,
        )

    async def _run(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        return ToolResult(call_id=call.id, name=call.name, success=True, output=f"did {call.arguments.get('text')}")

    async def work(self) -> RunResult:
        async with asyncio.timeout(SOON_S):
            return await self._agent.run("do it")

    @property
    def visible_text(self) -> str:
        """Return the text that a user who follows the events sees."""
        text = ""
        for event in self.events:
            if isinstance(event, TextArrived):
                text += event.text
            elif isinstance(event, TextWithdrawn):
                text = text[: len(text) - event.characters]
        return text

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]


def streams(*replies: Sequence[Chunk | Exception]) -> StreamModel:
    """Return a model whose replies are these chunks. An exception among the chunks is raised."""
    remaining = iter(replies)

    async def stream(_: ModelRequest) -> AsyncIterator[Chunk]:
        for item in next(remaining):
            if isinstance(item, Exception):
                raise item
            yield item

    return StreamModel(stream)


BROKE = ModelInterrupted("the model broke off its reply")


async def test_a_different_second_reply_withdraws_the_text_already_shown() -> None:
    harness = Harness(streams([chunk("It is five"), BROKE], [chunk("It is 4", "stop")]))
    assert ((await harness.work()).answer, harness.visible_text) == ("It is 4", "It is 4")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_tokens": 200}, StopReason.MAX_TOKENS),
        ({"max_cost": 0.0002, "prices": Prices(1.0, 1.0)}, StopReason.MAX_COST),
    ],
    ids=["tokens", "cost"],
)
async def test_interrupted_replies_count_for_the_limits_of_the_run(limits: dict[str, Any], reason: StopReason) -> None:
    harness = Harness(streams([chunk("z" * 4000), BROKE], [chunk("It is 4", "stop")]), **limits)
    result = await harness.work()
    assert (result.stop_reason, result.answer) == (reason, "")


async def test_an_interrupted_reply_that_had_not_begun_costs_nothing() -> None:
    harness = Harness(streams([BROKE], [chunk("It is 4", "stop")]), max_tokens=1)
    result = await harness.work()
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "It is 4")


async def test_interrupted_and_complete_replies_are_both_in_the_cost() -> None:
    usage = {"usage": {"prompt_tokens": 1000, "completion_tokens": 500}}
    replies = streams([{**chunk("It"), **usage}, BROKE], [{**chunk("It is 4", "stop"), **usage}])
    result = await Harness(replies, prices=Prices(1.0, 2.0)).work()
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2000, 1000)
    assert result.cost == pytest.approx(0.004)


async def test_tag_calls_that_ran_before_an_interruption_are_not_repeated() -> None:
    model = ScriptedModel(["It did a."])
    requests: list[ModelRequest] = []

    async def stream(request: ModelRequest) -> AsyncIterator[Chunk]:
        requests.append(request)
        if len(requests) == 1:
            yield chunk(f"See: {TAG} and <tool_action name=")
            raise BROKE
        async for one in model.stream(request):
            yield one

    harness = Harness(StreamModel(stream), TagsDialect())
    result = await harness.work()
    assert (result.answer, len(harness.calls), result.steps) == ("It did a.", 1, 2)
    assert "did a" in requests[1].messages[-1]["content"]
    assert "unclosed" in requests[1].messages[-1]["content"]


async def test_a_request_above_the_context_window_is_sent_again_with_shorter_results() -> None:
    requests: list[ModelRequest] = []

    async def stream(request: ModelRequest) -> AsyncIterator[Chunk]:
        requests.append(request)
        size = sum(len(str(message.get("content"))) for message in request.messages)
        if size > 40_000:
            raise ContextWindowExceeded("too long", 10_000)
        if len(request.messages) < 9:
            call = {
                "index": 0,
                "id": f"c{len(request.messages)}",
                "function": {"name": "echo", "arguments": f'{{"text": "{"z" * 15_000}"}}'},
            }
            yield chunk(tool_calls=[call])
        yield chunk("All done.", "stop")

    harness = Harness(StreamModel(stream))
    result = await harness.work()
    assert (result.answer, result.stop_reason) == ("All done.", StopReason.ANSWERED)
    assert "left out to fit the context window" in str(requests[-1].messages)
    assert any("shortened to fit the context window" in warning for warning in harness.warnings)
    assert "left out" not in result.transcript.to_json_lines()


async def test_repeated_malformed_replies_end_the_run_at_the_limit() -> None:
    harness = Harness(
        ScriptedModel(lambda _: Calls([("echo", "{")], "Hm.")), max_iterations=50, max_malformed_replies=3
    )
    result = await harness.work()
    assert (result.stop_reason, result.steps, result.answer) == (StopReason.MALFORMED_REPLY, 3, "Hm.")
    assert harness.calls == []


@pytest.mark.parametrize("text", ["", " \n\t", "<think>hm", "<think>hm</think>", "<think>hm</think>\n \n"])
@EACH_DIALECT
async def test_an_empty_reply_ends_the_run_with_a_warning(text: str, dialect: Dialect) -> None:
    harness = Harness(streams([chunk(text, "stop")], [chunk(text, "stop")]), dialect)
    result = await harness.work()
    assert result.answer.strip() in ("", text.strip())
    assert result.stop_reason in (StopReason.EMPTY_REPLY, StopReason.MALFORMED_REPLY)
    assert harness.warnings


@EACH_DIALECT
@pytest.mark.parametrize(
    "text", ["nul \0 here", "half \ud83d", "\ude00 half", "\ud83d\ude00", "\x1b[2J\u202e"], ids=range(5)
)
async def test_control_and_surrogate_characters_give_a_valid_transcript(text: str, dialect: Dialect) -> None:
    result = await Harness(streams([chunk(text, "stop")], [chunk(text, "stop")]), dialect).work()
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert result.answer == expected
    assert result.transcript.to_json_lines().encode()


@pytest.mark.parametrize("dialect", [NativeDialect, TagsDialect], ids=["native", "tags"])
async def test_a_reply_of_one_hundred_megabytes_is_an_answer(dialect: Callable[[], Dialect]) -> None:
    piece = "0123456789abcdef" * 4096
    result = await Harness(streams([chunk(piece)] * 1600 + [chunk("", "stop")]), dialect()).work()
    assert (len(result.answer), result.stop_reason) == (1600 * len(piece), StopReason.ANSWERED)


async def test_a_reply_cut_at_the_token_limit_runs_all_calls_but_the_last() -> None:
    entries = [
        {"index": n, "id": f"c{n}", "function": {"name": "echo", "arguments": f'{{"text": "{n}"}}'}} for n in range(3)
    ]
    model = ScriptedModel([Raw([chunk(tool_calls=entries), chunk("", "length")]), "ok"])
    harness = Harness(model)
    await harness.work()
    assert [call.arguments["text"] for call in harness.calls] == ["0", "1"]
    assert "cut at the token limit" in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("is_native", [True, False])
async def test_only_the_first_256_calls_of_a_reply_run(is_native: bool) -> None:
    entries = [{"index": n, "id": f"c{n}", "function": {"name": "echo", "arguments": "{}"}} for n in range(40_000)]
    reply = chunk(tool_calls=entries) if is_native else chunk(TAG * 40_000)
    model = ScriptedModel([Raw([reply]), "ok"])
    harness = Harness(model, NativeDialect() if is_native else TagsDialect())
    started = time.process_time()
    await harness.work()
    assert len(harness.calls) == MAX_CALLS
    results = [message for message in model.requests[1].messages if "first 256 were run" in str(message)]
    assert len(results) == 1
    assert time.process_time() - started < 1.0


async def test_an_interrupted_reply_is_requested_again_and_its_text_shown_once() -> None:
    harness = Harness(streams([chunk("The ans"), BROKE], [chunk("The answer"), chunk(" is 4", "stop")]))
    result = await harness.work()
    assert (result.answer, harness.visible_text, result.steps) == ("The answer is 4", "The answer is 4", 1)
    assert [event.text for event in harness.events if isinstance(event, TextArrived)] == ["The ans", "wer", " is 4"]
    assert "requested again" in harness.warnings[0]
