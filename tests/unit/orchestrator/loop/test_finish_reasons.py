"""Ends of replies: only a normal end is an answer, every other one has a stop reason of its own, and the server's word
is kept.
"""

import asyncio
from typing import Any

import pytest

from tests.support.models.model_endpoint import END, answer, serving, stream
from tests.support.records.builders import build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ModelUnavailable
from toolcrew.contract.run_events import FailureKind
from toolcrew.orchestrator.batches.rows import build_chat_body, build_run_body
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.finish_reasons import MAX_CHARS, ReplyEnding, classify_ending
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.runs.outcomes import judge_run

HALF = "The first step is to"
WORDS = {
    ReplyEnding.NORMAL: ["stop", "tool_calls", "function_call", "end_turn", "eos", "stop_sequence", "STOP", "COMPLETE", "eos_found", "<|im_end|>"],
    ReplyEnding.CUT: ["length", "max_tokens", "MAX_TOKENS", "model_length", "model_context_window_exceeded"],
    ReplyEnding.FILTERED: [
        "content_filter", "SAFETY", "safety", "recitation", "RECITATION", "prohibited_content", "blocklist", "SPII",
        "sensitive", "guardrail_intervened", "FinishReason.SAFETY", "content_filter: PROHIBITED_CONTENT", "ContentFiltered",
    ],
    ReplyEnding.REFUSED: ["refusal"],
    ReplyEnding.FAILED: ["error", "abort", "network_error", "insufficient_system_resource", "cancelled", "engine_overloaded"],
    ReplyEnding.BAD_CALL: [
        "malformed_function_call", "MALFORMED_FUNCTION_CALL", "function_call_filter: MALFORMED_FUNCTION_CALL",
        "UNEXPECTED_TOOL_CALL", "function_call_filter: UNEXPECTED_TOOL_CALL",
    ],
    ReplyEnding.UNKNOWN: ["a new word", "pause_turn", ":", "?"],
}  # fmt: skip
STOPS = {
    ReplyEnding.CUT: StopReason.CUT_REPLY,
    ReplyEnding.FILTERED: StopReason.CONTENT_FILTER,
    ReplyEnding.REFUSED: StopReason.REFUSED,
    ReplyEnding.FAILED: StopReason.FAILED_REPLY,
    ReplyEnding.UNKNOWN: StopReason.UNKNOWN_END,
}
CASES = [(word, ending) for ending, words in WORDS.items() for word in words]
UNFINISHED = [(word, STOPS[ending]) for word, ending in CASES if ending in STOPS]


def delta(finish: Any = None, **fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def whole(finish: Any, message: Any, **fields: Any) -> bytes:
    return answer(200, {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **fields})


async def run(
    *replies: bytes, streaming: bool = True, dialect: Dialect | None = None, calls: list[ToolCall] | None = None
) -> tuple[RunResult, list[dict[str, Any]]]:
    async def run_call(call: ToolCall) -> ToolResult:
        if calls is not None:
            calls.append(call)
        return ToolResult(call_id=call.id, name=call.name, success=True, output="did it")

    async with serving(replies) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0, streaming=streaming)
        try:
            result = await Agent(model, dialect or NativeDialect(), [build_spec("echo")], run_call).run("go")
        finally:
            await model.aclose()
    return result, server.bodies


@pytest.mark.parametrize(("word", "ending"), CASES)
def test_every_known_word_has_a_meaning(word: str, ending: ReplyEnding) -> None:
    assert classify_ending(word) is ending


def test_a_reply_without_a_word_ended_normally_unless_it_is_a_refusal() -> None:
    assert classify_ending(None) is ReplyEnding.NORMAL
    assert classify_ending("stop", is_refusal=True) is ReplyEnding.REFUSED


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("word", "reason"), UNFINISHED)
async def test_an_incomplete_reply_is_no_answer_and_a_failure_of_the_model(
    word: str, reason: StopReason, streaming: bool
) -> None:
    reply = stream(delta(content=HALF), delta(word)) if streaming else whole(word, {"content": HALF})
    result, _ = await run(reply, streaming=streaming)
    assert (result.stop_reason, result.answer, result.finish_reason) == (reason, HALF, word)
    failure = judge_run(result)
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.MODEL, reason.value)
    [choice] = build_chat_body(result, model="m", created=0.0)["choices"]  # type: ignore[misc, union-attr]
    assert choice["finish_reason"] == word  # type: ignore[index, call-overload]
    assert build_run_body(result)["finish_reason"] == word


@pytest.mark.parametrize("dialect", [NativeDialect(), TagsDialect(), JsonDecisionDialect()], ids=lambda one: one.name)
async def test_an_incomplete_reply_is_no_answer_in_any_dialect(dialect: Dialect) -> None:
    text = '{"tool": null, "reply": "The first"}' if dialect.name == "json" else HALF
    result, _ = await run(stream(delta(content=text), delta("content_filter")), dialect=dialect)
    assert result.stop_reason is StopReason.CONTENT_FILTER


@pytest.mark.parametrize("word", ["a new word", "content_filter", "error"])
def test_the_failure_names_the_words_of_the_server(word: str) -> None:
    result, _ = asyncio.run(run(stream(delta(content=HALF), delta(word))))
    failure = judge_run(result)
    assert failure is not None
    assert word in failure.message


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("content", [None, ""])
async def test_a_refusal_is_no_answer(streaming: bool, content: str | None) -> None:
    reply = (
        stream(delta(role="assistant", content=content, refusal=""), delta(refusal="I "), delta(refusal="won't"), END)
        if streaming
        else whole("stop", {"role": "assistant", "content": content, "refusal": "I won't"})
    )
    result, _ = await run(reply, streaming=streaming)
    assert (result.stop_reason, result.answer) == (StopReason.REFUSED, "I won't")
    [choice] = build_chat_body(result, model="m", created=0.0)["choices"]  # type: ignore[misc, union-attr]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": "I won't"}  # type: ignore[index, call-overload]


CALLS = [
    {"index": n, "id": f"c{n}", "type": "function", "function": {"name": "echo", "arguments": '{"text": "a"}'}}
    for n in range(2)
]


@pytest.mark.parametrize("word", ["content_filter", "error", "abort", "max_tokens", "malformed_function_call"])
async def test_the_last_call_of_an_incomplete_reply_does_not_run(word: str) -> None:
    calls: list[ToolCall] = []
    _, bodies = await run(stream(delta(tool_calls=CALLS), delta(word)), stream(delta(content="done"), END), calls=calls)
    assert len(calls) == 1
    assert bodies[1]["messages"][-1]["content"].startswith("Error [INVALID_ARGUMENTS]")


async def test_complete_calls_run_after_an_unknown_word() -> None:
    calls: list[ToolCall] = []
    result, _ = await run(
        stream(delta(tool_calls=CALLS), delta("a new word")), stream(delta(content="done"), END), calls=calls
    )
    assert (len(calls), result.stop_reason) == (2, StopReason.ANSWERED)


@pytest.mark.parametrize("word", WORDS[ReplyEnding.BAD_CALL])
@pytest.mark.parametrize("streaming", [True, False])
async def test_the_model_writes_a_call_again_that_the_server_could_not_read(word: str, streaming: bool) -> None:
    first = stream(delta(word, role="assistant")) if streaming else whole(word, None)
    second = stream(delta(content="done"), END) if streaming else whole("stop", {"content": "done"})
    result, bodies = await run(first, second, streaming=streaming)
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "done")
    assert "INVALID_ARGUMENTS" in bodies[1]["messages"][-1]["content"]


@pytest.mark.parametrize("word", ["tool_calls", "tool_use", "function_call"])
@pytest.mark.parametrize("content", ["Let me look.", "", None])
async def test_the_model_writes_a_call_again_that_the_server_announced_and_lost(word: str, content: str | None) -> None:
    result, bodies = await run(stream(delta(content=content), delta(word)), stream(delta(content="done"), END))
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "done")
    assert "INVALID_ARGUMENTS" in bodies[1]["messages"][-1]["content"]


async def test_a_server_that_never_reads_the_calls_ends_the_run() -> None:
    result, bodies = await run(stream(delta("malformed_function_call")))
    assert result.stop_reason is StopReason.MALFORMED_REPLY
    assert len(bodies) == 3


@pytest.mark.parametrize("word", [{"type": "safety"}, "x" * 10_000, ["content_filter"], 7])
async def test_a_word_of_any_type_is_kept_as_a_short_text(word: Any) -> None:
    result, _ = await run(stream(delta(content=HALF), delta(word)))
    assert result.stop_reason is not StopReason.ANSWERED
    assert result.finish_reason is not None
    assert len(result.finish_reason) <= MAX_CHARS


ERROR = {"message": "the server of the model failed", "code": 502}
FAILURES = [
    ("an error next to choices", False, answer(200, {"error": ERROR, "choices": [{"message": {"content": HALF}}]})),
    ("an error in a choice", False, answer(200, {"choices": [{"message": {"content": HALF}, "error": ERROR}]})),
    ("an error in a choice that ended by it", False, answer(200, {"choices": [{"message": {"content": HALF}, "finish_reason": "error", "error": ERROR}]})),
    ("an error instead of a reply", False, answer(200, {"object": "error", "message": "failed"})),
    ("an error in a later chunk", True, stream(delta(content=HALF), {"error": ERROR})),
    ("an error next to choices of a chunk", True, stream(delta(content=HALF), {**delta("error"), "error": ERROR})),
    ("an error in the choice of a chunk", True, stream(delta(content=HALF), {"choices": [{"delta": {}, "finish_reason": "error", "error": ERROR}]})),
    ("an object of type error in a later chunk", True, stream(delta(content=HALF), {"object": "error", "message": "failed"})),
    ("a stream without an end", True, stream(delta(content=HALF), done=False)),
    ("a stream with only the last line", True, stream(delta(content=HALF))),
    ("a stream with a null end", True, stream(delta(content=HALF), delta(None))),
    ("a stream with an empty end", True, stream(delta(content=HALF), delta(""))),
    ("an empty stream", True, stream()),
    ("no choices", False, answer(200, {"choices": []})),
    ("choices that are null", False, answer(200, {"choices": None})),
]  # fmt: skip


@pytest.mark.parametrize(("streaming", "reply"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES])
async def test_a_reply_that_failed_at_the_server_is_an_error(streaming: bool, reply: bytes) -> None:
    with pytest.raises(ModelUnavailable):
        await run(reply, streaming=streaming)


@pytest.mark.parametrize(
    ("streaming", "reply"),
    [
        (False, answer(200, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}})),
        (False, whole("stop", None)),
        (True, stream({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}})),
        (True, stream(END)),
    ],
)
async def test_a_reply_without_content_is_an_empty_reply(streaming: bool, reply: bytes) -> None:
    result, _ = await run(reply, streaming=streaming)
    assert result.stop_reason is StopReason.EMPTY_REPLY


@pytest.mark.parametrize("extra", [{"error": {"code": 0}}, {"error": None}])
async def test_an_error_next_to_a_normal_end_is_ignored(extra: dict[str, Any]) -> None:
    result, _ = await run(whole("stop", {"content": "done"}, **extra), streaming=False)
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "done")


async def test_a_whole_reply_without_a_word_is_an_answer() -> None:
    result, _ = await run(answer(200, {"choices": [{"message": {"content": "done"}}]}), streaming=False)
    assert result.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize(
    "noise",
    [
        ": keep-alive",
        "data:",
        "data: ",
        "event: ping\ndata:",
        "id: 7\nretry: 1000",
        'event: ping\ndata: {"type": "ping"}',
    ],
)
async def test_events_that_only_keep_the_connection_open_are_skipped(noise: str) -> None:
    reply = stream(delta(content="do"), delta(content="ne"), END).replace(b"\n\n", f"\n\n{noise}\n\n".encode())
    result, _ = await run(reply)
    assert (result.stop_reason, result.answer) == (StopReason.ANSWERED, "done")
