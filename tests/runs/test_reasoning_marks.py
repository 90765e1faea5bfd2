"""Reasoning in the text of replies: calls in it do not run and it is no part of the answer, however it is marked."""

from typing import Any

import pytest

from tests.runs.test_model_runs import build_models
from tests.support.models.model_endpoint import END, answer, serving, stream
from tests.support.records.builders import build_spec
from tests.support.runs.item_harness import HarnessFactory, build_run
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.orchestrator.dialects.base import CallRequested, Dialect, Text
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.dialects.thinking import (
    REASONING,
    LoneEndFinder,
    find_lone_end,
    mark_reasoning,
    strip_thinking,
)
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.models.openai import OpenAIModel

TAG = '<tool_action name="echo"><text value="a"/></tool_action>'
OBJECT = '{"tool": "echo", "arguments": {"text": "a"}}'
LONE = f"try {TAG} no\n</think>\nDone."

ANSWERS = [
    (LONE, "Done."),
    ("a </think> b </think> c", "c"),
    ("<think>a</think> b", "b"),
    ("\n<think>a</think> b", "b"),
    ("<think>a", ""),
    ("<think>a</think> b </think> c", "c"),
    ("<thinking>a</thinking>b", "b"),
    ("[THINK]a[/THINK]b", "b"),
    ("a[/THINK]b", "b"),
    ("◁think▷a◁/think▷b", "b"),
    ("<|START_THINKING|>a<|END_THINKING|>b", "b"),
    ("<|begin_of_thought|>a<|end_of_thought|>b", "b"),
    ("<seed:think>a</seed:think>b", "b"),
    ("<thought>a</thought>b", "b"),
    ("<reasoning>a</reasoning>b", "b"),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
    # What is no reasoning.
    ("plain", "plain"),
    ("The mark `</think>` ends it.", "The mark `</think>` ends it."),
    ('It is "</think>" here.', 'It is "</think>" here.'),
    ("<p>a</reasoning>b", "<p>a</reasoning>b"),
    ("see <think>a</think> b", "see <think>a</think> b"),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_answer_begins_after_the_reasoning(text: str, expected: str) -> None:
    assert strip_thinking(text) == expected


def chunk(text: str, **fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


def read(dialect: Dialect, text: str, size: int, reasoning: Any = None) -> tuple[list[str], str]:
    """Return the tools that run, and what the events contain."""
    reader, chunks = dialect.open_reader("r", 1), [chunk(text[at : at + size]) for at in range(0, len(text), size)]
    if reasoning == "exact":
        mark_reasoning(chunks, text)
    elif reasoning:
        chunks[0][REASONING] = True
    events = [event for part in chunks for event in reader.feed(part)]
    last, _ = reader.finish()
    calls = [event.call.name for event in [*events, *last] if isinstance(event, CallRequested)]
    return calls, "".join(event.text if isinstance(event, Text) else event.raw for event in [*events, *last])


SIZES = [1, 7, 1000]


@pytest.mark.parametrize("size", SIZES)
def test_native_dialect_runs_no_tag_before_a_lone_end(size: int) -> None:
    assert read(NativeDialect(), LONE, size) == ([], LONE)
    assert read(NativeDialect(), f"no </think> {TAG}", size) == (["echo"], f"no </think> {TAG}")
    both = f"{TAG} no </think> {TAG}"
    assert read(NativeDialect(), both, size) == (["echo"], both)
    unclosed = f"<tool_action name='x'> no </think> {TAG}"
    assert read(NativeDialect(), unclosed, size) == (["echo"], unclosed)


@pytest.mark.parametrize("reasoning", ["exact", True])
@pytest.mark.parametrize("size", SIZES)
def test_tags_dialect_runs_no_tag_before_an_expected_end(size: int, reasoning: Any) -> None:
    for text, calls in [(LONE, []), (f"{TAG} no </think> {TAG}", ["echo"]), (f"go {TAG}", ["echo"]), ("plain", [])]:
        assert read(TagsDialect(), text, size, reasoning) == (calls, text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", [f"{begin}x {TAG} y" for begin in ("[THINK]", "◁think▷", "<thinking>", "<think>")])
def test_no_tag_runs_in_a_block_at_the_start(text: str, size: int) -> None:
    for dialect in (TagsDialect(), NativeDialect()):
        assert read(dialect, text, size)[0] == []
    closed = (
        text.replace("[THINK]", "[THINK]", 1)
        + {"[": "[/THINK]", "◁": "◁/think▷"}.get(text[0], f"</{text[1 : text.index('>')]}>")
        + TAG
    )
    for dialect in (TagsDialect(), NativeDialect()):
        assert read(dialect, closed, size)[0] == ["echo"]


@pytest.mark.parametrize("size", SIZES)
def test_json_dialect_runs_the_decision_after_the_reasoning(size: int) -> None:
    assert read(JsonDecisionDialect(), f"perhaps {OBJECT}\n</think>\n{OBJECT}", size)[0] == ["echo"]
    assert read(JsonDecisionDialect(), f'{OBJECT} no\n</think>\n{{"tool": null, "reply": "Done."}}', size)[0] == []


async def run(*replies: bytes, streaming: bool = True, dialect: Dialect) -> tuple[RunResult, list[ToolCall], int]:
    calls: list[ToolCall] = []

    async def run_call(call: ToolCall) -> ToolResult:
        calls.append(call)
        return ToolResult(call_id=call.id, name=call.name, success=True, output="did it")

    async with serving(replies) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0, streaming=streaming)
        result = await Agent(model, dialect, [build_spec("echo")], run_call).run("go")
        await model.aclose()
        return result, calls, len(server.bodies)


@pytest.mark.parametrize("dialect", [NativeDialect(), TagsDialect()], ids=lambda one: one.name)
async def test_whole_reply_with_a_lone_end_runs_no_call_before_it(dialect: Dialect) -> None:
    reply = answer(200, {"choices": [{"message": {"content": LONE}, "finish_reason": "stop"}]})
    result, calls, _ = await run(reply, streaming=False, dialect=dialect)
    assert (result.answer, calls) == ("Done.", [])


async def test_streamed_reply_with_a_lone_end_runs_no_call_after_the_endpoint_is_known() -> None:
    first = stream(chunk("I think.\n</think>\n" + TAG), END)
    probe, second = stream(chunk("They want ok.\n</think>\n\nok"), END), stream(*(chunk(part) for part in LONE), END)
    result, calls, requests = await run(first, probe, second, dialect=TagsDialect())
    assert (result.answer, len(calls), requests) == ("Done.", 1, 3)


async def test_a_reply_that_only_quotes_an_end_changes_nothing_for_later_replies() -> None:
    """The content of a tenant can make any model write an end mark."""
    async with serving([stream(chunk("a </think> b"), END), stream(chunk("ok"), END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        for _ in range(3):
            await Agent(model, TagsDialect(), [], lambda call: None).run("go")  # type: ignore[arg-type, return-value]
        assert model._opens_reasoning is False
        await model.aclose()
    assert len(server.bodies) == 4


CUT = stream(chunk("I think"), {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})


@pytest.mark.parametrize("failure", [answer(500, {"error": {"message": "busy"}}), CUT], ids=["error", "cut off"])
async def test_question_that_a_failed_request_left_open_is_asked_again(
    failure: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.models.openai.LEARN_PAUSE_S", 0.0)
    raising = stream(chunk("I think.\n</think>\nok"), END)
    async with serving([raising, failure, raising, raising, stream(chunk("plain"), END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        for expected in (None, True, True):
            await Agent(model, TagsDialect(), [], lambda call: None).run("go")  # type: ignore[arg-type, return-value]
            assert model._opens_reasoning is expected
        await model.aclose()
    assert len(server.bodies) == 5


async def test_question_that_a_failed_request_left_open_waits_before_it_is_asked_again() -> None:
    raising = stream(chunk("I think.\n</think>\nok"), END)
    async with serving([raising, answer(500, {}), raising, raising]) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        for _ in range(3):
            await Agent(model, TagsDialect(), [], lambda call: None).run("go")  # type: ignore[arg-type, return-value]
        await model.aclose()
    assert len(server.bodies) == 4


@pytest.mark.parametrize("dialect", ["native", "tags", "json"])
async def test_durable_run_runs_no_call_before_a_lone_end(make: HarnessFactory, dialect: str) -> None:
    harness = make()
    text = f'{OBJECT} no\n</think>\n{{"tool": null, "reply": "Done."}}' if dialect == "json" else LONE
    # The capabilities of the model are probed first.
    async with serving([stream(*(chunk(part) for part in text), END)]) as server:
        harness.work.models = build_models(harness.client, openai_base_url=server.url, model="m", model_retries=0)
        outcome = await harness.execute(await harness.put(build_run(dialect=dialect)))
    assert outcome.failure is None
    assert (outcome.body["answer"], outcome.body["steps"]) == ("Done.", 1)


def test_marks_are_found_in_linear_time() -> None:
    assert find_lone_end("<think>" * 200_000 + "</think>" * 200_000) == 0
    assert find_lone_end("x" * 2_000_000 + "</think>") == 2_000_008


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize("before", ["", "\n\n", " \t\n"])
@pytest.mark.parametrize("dialect", [TagsDialect(), NativeDialect()], ids=lambda one: one.name)
def test_a_call_in_a_block_after_blanks_does_not_run(dialect: Dialect, before: str, size: int) -> None:
    text = f"{before}<think>\ntry {TAG}\n</think>\n\nDone."
    calls, _ = read(dialect, text, size)
    assert calls == []
    calls, _ = read(dialect, f"{text}{TAG}", size)
    assert len(calls) == 1


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize(
    "text", ["\n<think>a</think>b", "<|begin_of_thought|>a<|end_of_thought|>b", "[THINK]a[/THINK]b"]
)
def test_a_block_with_a_beginning_raises_no_question(text: str, size: int) -> None:
    finder = LoneEndFinder()
    for at in range(0, len(text), size):
        finder.feed(text[at : at + size])
    assert not finder.is_found
