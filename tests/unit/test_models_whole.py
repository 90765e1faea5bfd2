"""Replies that arrive complete: the reader gets the same chunks as from a stream."""

import json
from typing import Any

import pytest

from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.dialects.native_assembler import NativeCallAssembler, NativeReply
from orchestrator.models.chunks import has_content, is_end, normalize, split_reply
from orchestrator.models.openai import OpenAIModel
from tests.model_endpoint import answer, failure, read, serving, text_of


def whole(message: dict[str, Any], finish_reason: str | None = "stop", **rest: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        **rest,
    }


def assemble(reply: dict[str, Any]) -> NativeReply:
    assembler = NativeCallAssembler()
    for chunk in split_reply(reply) or ():
        assembler.feed(chunk)
    return assembler.finish()


def call(name: str, arguments: Any, **rest: Any) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}, **rest}


def test_entries_that_are_no_calls_are_left_out() -> None:
    assert [made.name for made in assemble(whole({"tool_calls": [None, "x", call("one", {})]})).calls] == ["one"]


def test_a_refusal_is_text_only_where_there_is_none() -> None:
    assert assemble(whole({"content": None, "refusal": "I cannot"})).text == "I cannot"
    assert assemble(whole({"content": "yes", "refusal": "I cannot"})).text == "yes"


@pytest.mark.parametrize(
    "chunk", [{}, {"choices": None}, {"choices": 7}, {"choices": [None, 7]}, {"choices": [{"delta": "x"}]}]
)
def test_chunks_of_any_shape_are_let_through(chunk: Chunk) -> None:
    assert normalize(chunk) == chunk
    assert not has_content(chunk)
    assert not is_end(chunk)


async def test_a_model_that_does_not_stream_sends_no_stream_options_and_reads_one_reply() -> None:
    async with serving([answer(200, whole({"content": "hé\U0001f600"}, usage={"prompt_tokens": 3}))]) as server:
        chunks = await read(OpenAIModel("m", server.url, streaming=False, retries=0))
        assert (server.bodies[0]["stream"], "stream_options" in server.bodies[0]) == (False, False)
    assert text_of(chunks) == "hé\U0001f600"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(200, "<html>Welcome</html>", "text/html"), "did not answer as a chat endpoint does"),
        (answer(200, "{broken"), "broke off its reply"),
        (answer(200, ""), "broke off its reply"),
        (answer(200, {"choices": []}), "did not answer as a chat endpoint does"),
        (answer(200, {"error": {"message": "no such key sk-very-secret", "code": 401}}), "no such key ***"),
        (answer(200, {"error": "busy with sk-very-secret"}), "busy with ***"),
        (
            answer(200, json.dumps(whole({}))).replace(b"content-length: ", b"content-length: 9"),
            "cannot be reached or broke off",
        ),
    ],
)
async def test_an_invalid_reply_is_a_short_error(reply: bytes, message: str) -> None:
    async with serving([reply]) as server:
        sentence = str(
            await failure(read(OpenAIModel("m", server.url, "sk-very-secret", 5.0, retries=0, streaming=False)))
        )
    assert message in sentence
    assert "sk-very" not in sentence


async def test_a_whole_reply_may_be_left_after_its_first_chunk() -> None:
    async with serving([answer(200, whole({"content": "hi"}))]) as server:
        model = OpenAIModel("m", server.url, streaming=False)
        stream = model.stream(ModelRequest([]))
        assert text_of([await anext(stream)]) == "hi"
        await stream.aclose()  # type: ignore[attr-defined]  # every model of ours is an async generator
        await model.aclose()
