"""The loop with difficult replies: broken off, too long, malformed, empty, huge or hostile. Each has a defined end,
and nothing is lost.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ContextWindowExceeded, ModelInterrupted
from contract.run_events import RunEvent, TextArrived, TextWithdrawn, Warned
from orchestrator.dialects.base import Dialect
from orchestrator.dialects.json_decision import JsonDecisionDialect
from orchestrator.dialects.model import Chunk, Model, ModelRequest
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.reader import MAX_CALLS
from orchestrator.dialects.tags import TagsDialect
from orchestrator.loop.agent import Agent, RunResult
from orchestrator.loop.limits import ReActOptions, StopReason
from orchestrator.models.scripted import Calls, Raw, ScriptedModel
from tests.builders import build_spec
from tests.fakes import StreamModel

SOON_S = 20.0
TAG = '<tool_action name="echo"><text value="a" /></tool_action>'


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
    def shown(self) -> str:
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


def chunk(text: str = "", finish: str | None = None, **delta: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]}


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

# Broken off


async def test_a_reply_that_breaks_off_is_asked_for_again_and_shown_once() -> None:
    harness = Harness(streams([chunk("The ans"), BROKE], [chunk("The answer"), chunk(" is 4", "stop")]))
    result = await harness.work()
    assert (result.answer, harness.shown, result.steps) == ("The answer is 4", "The answer is 4", 1)
    assert [event.text for event in harness.events if isinstance(event, TextArrived)] == ["The ans", "wer", " is 4"]
    assert "requested again" in harness.warnings[0]


async def test_another_reply_after_a_break_withdraws_what_was_shown() -> None:
    harness = Harness(streams([chunk("It is five"), BROKE], [chunk("It is 4", "stop")]))
    assert ((await harness.work()).answer, harness.shown) == ("It is 4", "It is 4")


async def test_native_calls_of_a_broken_reply_are_not_run_twice_nor_half() -> None:
    opening = {"index": 0, "id": "c", "function": {"name": "echo", "arguments": '{"text": "a"}'}}
    harness = Harness(
        streams(
            [chunk(tool_calls=[opening]), BROKE],
            [chunk(tool_calls=[opening]), chunk("", "tool_calls")],
            [chunk("ok", "stop")],
        )
    )
    assert ((await harness.work()).answer, len(harness.calls)) == ("ok", 1)


async def test_calls_by_tag_that_ran_before_the_break_are_kept_and_the_model_goes_on() -> None:
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


@pytest.mark.parametrize("cut", range(0, 120, 7))
async def test_a_stream_cut_at_any_byte_gives_the_same_answer_after_all(cut: int) -> None:
    text = f"First {TAG} then "
    whole = [chunk(character) for character in text]
    harness = Harness(
        streams([*whole[:cut], BROKE], [*whole, chunk("", "stop")], [chunk("Done.", "stop")], [chunk("Done.", "stop")]),
        TagsDialect(),
    )
    assert (await harness.work()).answer == "Done."
    assert [call.arguments for call in harness.calls][:1] == [{"text": "a"}]


# Too long


async def test_a_request_that_is_too_long_is_sent_again_with_older_results_shortened() -> None:
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


# Malformed, empty, cut


async def test_replies_that_are_nothing_but_malformed_end_the_run_after_some() -> None:
    harness = Harness(
        ScriptedModel(lambda _: Calls([("echo", "{")], "Hm.")), max_iterations=50, max_malformed_replies=3
    )
    result = await harness.work()
    assert (result.stop_reason, result.steps, result.answer, harness.calls) == (
        StopReason.MALFORMED_REPLY,
        3,
        "Hm.",
        [],
    )


async def test_a_decision_that_cannot_be_read_gets_one_repair_round() -> None:
    model = ScriptedModel(["The tool is echo.", '{"tool": null, "reply": "It is 4."}'])
    result = await Harness(model, JsonDecisionDialect()).work()
    assert (result.answer, result.stop_reason, result.steps) == ("It is 4.", StopReason.ANSWERED, 2)
    assert 'Answer with one JSON object and nothing else: {"tool": "NAME"' in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("text", ["", " \n\t", "<think>hm", "<think>hm</think>", "<think>hm</think>\n \n"])
@pytest.mark.parametrize(
    "dialect", [NativeDialect(), TagsDialect(), JsonDecisionDialect()], ids=["native", "tags", "json"]
)
async def test_a_model_that_says_nothing_is_reported_and_ends_the_run(text: str, dialect: Dialect) -> None:
    harness = Harness(streams([chunk(text, "stop")], [chunk(text, "stop")]), dialect)
    result = await harness.work()
    assert result.answer.strip() in ("", text.strip())
    assert result.stop_reason in (StopReason.EMPTY_REPLY, StopReason.MALFORMED_REPLY)
    assert harness.warnings


async def test_thinking_before_the_answer_is_no_part_of_it_and_stays_in_the_transcript() -> None:
    harness = Harness(streams([chunk("<think>2+2</think>\n\nIt is 4.", "stop")]))
    result = await harness.work()
    assert (result.answer, result.transcript.messages()[-1]["content"]) == (
        "It is 4.",
        "<think>2+2</think>\n\nIt is 4.",
    )


# Huge and hostile


@pytest.mark.parametrize(
    "dialect", [NativeDialect(), TagsDialect(), JsonDecisionDialect()], ids=["native", "tags", "json"]
)
@pytest.mark.parametrize(
    "text", ["nul \0 here", "half \ud83d", "\ude00 half", "\ud83d\ude00", "\x1b[2J\u202e"], ids=range(5)
)
async def test_odd_characters_pass_through_to_a_transcript_that_can_be_written(text: str, dialect: Dialect) -> None:
    result = await Harness(streams([chunk(text, "stop")], [chunk(text, "stop")]), dialect).work()
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert result.answer == whole
    assert result.transcript.to_json_lines().encode()


@pytest.mark.parametrize("dialect", [NativeDialect, TagsDialect], ids=["native", "tags"])
async def test_a_hundred_megabytes_of_text_are_an_answer(dialect: Callable[[], Dialect]) -> None:
    piece = "0123456789abcdef" * 4096
    result = await Harness(streams([chunk(piece)] * 1600 + [chunk("", "stop")]), dialect()).work()
    assert (len(result.answer), result.stop_reason) == (1600 * len(piece), StopReason.ANSWERED)


async def test_a_cut_reply_runs_its_complete_calls_but_not_the_last() -> None:
    entries = [
        {"index": n, "id": f"c{n}", "function": {"name": "echo", "arguments": f'{{"text": "{n}"}}'}} for n in range(3)
    ]
    model = ScriptedModel([Raw([chunk(tool_calls=entries), chunk("", "length")]), "ok"])
    harness = Harness(model)
    await harness.work()
    assert [call.arguments["text"] for call in harness.calls] == ["0", "1"]
    assert "cut at the token limit" in model.requests[1].messages[-1]["content"]


@pytest.mark.parametrize("is_native", [True, False])
async def test_of_tens_of_thousands_of_calls_the_first_run_and_the_model_reads_why_the_others_did_not(
    is_native: bool,
) -> None:
    entries = [{"index": n, "id": f"c{n}", "function": {"name": "echo", "arguments": "{}"}} for n in range(40_000)]
    reply = chunk(tool_calls=entries) if is_native else chunk(TAG * 40_000)
    model = ScriptedModel([Raw([reply]), "ok"])
    harness = Harness(model, NativeDialect() if is_native else TagsDialect())
    began = time.process_time()
    await harness.work()
    assert len(harness.calls) == MAX_CALLS
    results = [message for message in model.requests[1].messages if "first 256 were run" in str(message)]
    assert len(results) == 1
    assert time.process_time() - began < 1.0


# Money
