"""Fields of a reply that the chat format does not define: they return unchanged to the endpoint that sent them, and to
no other.
"""

import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models.model_endpoint import END, answer, serving, stream
from tests.support.records.builders import build_spec
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ModelRefused
from toolcrew.contract.run_events import ModelReplied
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler
from toolcrew.orchestrator.dialects.reply_fields import MAX_CHARS, ORIGIN, PARTS, build_origin
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.runs.chunks import join_chunks
from toolcrew.orchestrator.runs.durable_runs import build_transcript
from toolcrew.orchestrator.sdk.tool_agent import CustomAgent, ToolAgent
from toolcrew.orchestrator.sdk.tool_loop import create_tool_registry, run_tool_loop
from toolcrew.store.batches import RUNS_URL, BatchItem
from toolcrew.store.run_records import RunRecord

CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "echo", "arguments": '{"text": "a"}'}}


def delta(**fields: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def of_call(**fields: Any) -> Chunk:
    return delta(tool_calls=[{**CALL, **fields}])


REPLIES: list[tuple[str, list[Chunk], dict[str, Any]]] = [
    (
        "DeepSeek and Kimi: reasoning in pieces",
        [delta(role="assistant", content=None, reasoning_content="need "), delta(reasoning_content="it"), of_call()],
        {"reasoning_content": "need it"},
    ),
    ("an empty reasoning stays", [delta(reasoning_content=""), of_call()], {"reasoning_content": ""}),
    ("Groq, OpenRouter, vLLM: reasoning", [delta(reasoning="a"), delta(reasoning="b"), of_call()], {"reasoning": "ab"}),
    (
        "LiteLLM: blocks of thinking without an index",
        [
            delta(thinking_blocks=[{"type": "thinking", "thinking": "a", "signature": None}]),
            delta(thinking_blocks=[{"type": "thinking", "thinking": "b", "signature": ""}]),
            delta(thinking_blocks=[{"type": "thinking", "thinking": "", "signature": "S1"}]),
            delta(thinking_blocks=[{"type": "redacted_thinking", "data": "X"}]),
            delta(thinking_blocks=[{"type": "thinking", "thinking": "c"}]),
            delta(thinking_blocks=[{"type": "thinking", "thinking": "", "signature": "S2"}]),
            of_call(),
        ],
        {
            "thinking_blocks": [
                {"type": "thinking", "thinking": "ab", "signature": "S1"},
                {"type": "redacted_thinking", "data": "X"},
                {"type": "thinking", "thinking": "c", "signature": "S2"},
            ]
        },
    ),
    (
        "whole blocks of thinking in one delta",
        [
            delta(thinking_blocks=[{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "b"}]),
            of_call(),
        ],
        {"thinking_blocks": [{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "b"}]},
    ),
    (
        "equal pieces are two pieces",
        [delta(reasoning=" the"), delta(reasoning=" the"), of_call()],
        {"reasoning": " the the"},
    ),
    (
        "OpenRouter: details by index, with a signature at the end",
        [
            delta(reasoning_details=[{"type": "reasoning.text", "text": "a", "format": "anthropic-v1", "index": 0}]),
            delta(reasoning_details=[{"type": "reasoning.text", "text": "b", "format": "anthropic-v1", "index": 0}]),
            delta(reasoning_details=[{"type": "reasoning.text", "signature": "SIG==", "index": 0}]),
            delta(reasoning_details=[{"type": "reasoning.encrypted", "data": "X", "id": "r1", "index": 1}]),
            delta(reasoning_details=[{"type": "reasoning.encrypted", "data": "X", "id": "r1", "index": 1}]),
            of_call(),
        ],
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "ab", "format": "anthropic-v1", "index": 0, "signature": "SIG=="},
                {"type": "reasoning.encrypted", "data": "X", "id": "r1", "index": 1},
            ]
        },
    ),
    (
        "two types at one index are two entries",
        [
            delta(reasoning_details=[{"type": "reasoning.text", "text": "a", "index": 0}]),
            delta(reasoning_details=[{"type": "reasoning.encrypted", "data": "X", "index": 0}]),
            of_call(),
        ],
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "a", "index": 0},
                {"type": "reasoning.encrypted", "data": "X", "index": 0},
            ]
        },
    ),
    (
        "entries without an index are appended, and a large index allocates nothing",
        [delta(parts=[{"a": "1"}, 2]), delta(parts=[{"index": 10**12, "a": "3"}]), of_call()],
        {"parts": [{"a": "1"}, 2, {"index": 10**12, "a": "3"}]},
    ),
    (
        "LiteLLM: nested objects are merged",
        [
            delta(provider_specific_fields={"thinking": {"text": "a", "n": 1}}),
            delta(provider_specific_fields={"thinking": {"text": "b", "n": 2}, "x": True}),
            of_call(),
        ],
        {"provider_specific_fields": {"thinking": {"text": "ab", "n": 2}, "x": True}},
    ),
    (
        "Gemini: a signature of a message",
        [delta(extra_content={"google": {"thought_signature": "S"}}), of_call()],
        {"extra_content": {"google": {"thought_signature": "S"}}},
    ),
    ("null is no value", [delta(reasoning_content=None, audio=None), of_call()], {}),
    (
        "half of a surrogate pair in each delta",
        [delta(reasoning="\ud83d"), delta(reasoning="\ude00"), of_call()],
        {"reasoning": "\U0001f600"},
    ),
]


def echo(call: ToolCall) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="did it")


async def run_echo(call: ToolCall) -> ToolResult:
    return echo(call)


async def ask_again(replies: Sequence[bytes], *, streaming: bool = True) -> list[dict[str, Any]]:
    """Return the messages of the request after a reply with a call."""
    async with serving(replies) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0, streaming=streaming)
        await Agent(model, NativeDialect(), [build_spec("echo")], run_echo).run("go")
        await model.aclose()
    messages: list[dict[str, Any]] = server.bodies[-1]["messages"]
    return messages


def whole(message: dict[str, Any], finish: str = "stop") -> bytes:
    return answer(200, {"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


@pytest.mark.parametrize("joins", [False, True], ids=["as sent", "joined for the log"])
@pytest.mark.parametrize(("chunks", "fields"), [case[1:] for case in REPLIES], ids=[case[0] for case in REPLIES])
async def test_fields_of_a_message_return_to_their_endpoint(
    chunks: list[Chunk], fields: dict[str, Any], joins: bool
) -> None:
    chunks = join_chunks(chunks) if joins else chunks
    messages = await ask_again([stream(*chunks, END), stream(delta(content="done"), END)])
    call = {key: value for key, value in CALL.items() if key != "index"}
    assert messages[2] == {"role": "assistant", "content": None, **fields, "tool_calls": [call]}


def thinking(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"type": "thinking", "thinking": [{"type": "text", "text": text} for text in texts], **fields}


PARTS_OF_CONTENT: list[tuple[str, list[Any], Any]] = [
    (
        "Mistral: one thought in pieces",
        [[thinking("need ")], [thinking("it", closed=True)]],
        [thinking("need it", closed=True)],
    ),
    (
        "a thought, then text",
        [[thinking("so")], [{"type": "text", "text": "I "}], "look", [{"type": "text", "text": "."}]],
        [thinking("so"), {"type": "text", "text": "I look."}],
    ),
    (
        "references in a thought are no text",
        [[{"type": "thinking", "thinking": [{"type": "reference", "reference_ids": [1]}]}], [thinking("a")]],
        [
            {
                "type": "thinking",
                "thinking": [{"type": "reference", "reference_ids": [1]}, {"type": "text", "text": "a"}],
            }
        ],
    ),
    (
        "parts of an unknown type stay apart",
        [[{"type": "x", "n": 1}], [{"type": "x", "n": 2}]],
        [{"type": "x", "n": 1}, {"type": "x", "n": 2}],
    ),
    ("only text", [[{"type": "text", "text": "I "}], [{"type": "text", "text": "look"}]], "I look"),
    ("what is no part", [[1, None, ["x"], {"type": "text", "text": 1}]], None),
]


@pytest.mark.parametrize("joins", [False, True], ids=["as sent", "joined for the log"])
@pytest.mark.parametrize(("contents", "sent"), [c[1:] for c in PARTS_OF_CONTENT], ids=[c[0] for c in PARTS_OF_CONTENT])
async def test_parts_of_the_content_return_to_their_endpoint(contents: list[Any], sent: Any, joins: bool) -> None:
    chunks = [delta(content=content) for content in contents] + [of_call()]
    chunks = join_chunks(chunks) if joins else chunks
    messages = await ask_again([stream(*chunks, END), stream(delta(content="done"), END)])
    assert messages[2]["content"] == sent
    assert set(messages[2]) == {"role", "content", "tool_calls"}


async def test_parts_of_a_whole_reply_return_to_their_endpoint() -> None:
    message = {"content": [thinking("a", "b"), {"type": "text", "text": "I look"}], "tool_calls": [CALL]}
    messages = await ask_again([whole(message), whole({"content": "done"})], streaming=False)
    assert messages[2]["content"] == [thinking("ab"), {"type": "text", "text": "I look"}]


async def test_parts_of_the_content_go_to_no_other_endpoint() -> None:
    own = {"role": "assistant", "content": "text", PARTS: [thinking("r")], "tool_calls": [CALL]}
    async with serving([stream(END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0)
        for origin in (build_origin(model.address, "m"), build_origin(model.address, "another model")):
            [_ async for _ in model.stream(ModelRequest([{**own, ORIGIN: origin}]))]
        await model.aclose()
    sent = [body["messages"][0]["content"] for body in server.bodies]
    assert sent == [[thinking("r"), {"type": "text", "text": "text"}], "text"]
    assert not any(PARTS in str(body) for body in server.bodies)


SIGNED = [
    {"extra_content": {"google": {"thought_signature": "S1"}}},
    {"thought_signature": "S1"},
    {"provider_specific_fields": {"thought_signature": "S1"}},
    {"function": {**CALL["function"], "thought_signature": "S1"}},  # type: ignore[dict-item]
]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("fields", SIGNED, ids=[next(iter(fields)) for fields in SIGNED])
async def test_fields_of_a_call_return_to_their_endpoint(fields: dict[str, Any], streaming: bool) -> None:
    second = {**CALL, "index": 1, "id": "c2"}
    calls = [{**CALL, **fields}, second]
    replies = (
        [stream(delta(tool_calls=calls), END), stream(delta(content="done"), END)]
        if streaming
        else [whole({"role": "assistant", "content": None, "tool_calls": calls}), whole({"content": "done"})]
    )
    messages = await ask_again(replies, streaming=streaming)
    assert messages[2]["tool_calls"] == [
        {key: value for key, value in call.items() if key != "index"} for call in ({**CALL, **fields}, second)
    ]


async def test_a_signature_that_arrives_with_each_piece_of_a_call_is_kept_once() -> None:
    signed = {"extra_content": {"google": {"thought_signature": "S1"}}}
    pieces = [
        {**CALL, "function": {"name": "echo", "arguments": '{"text": '}},
        {"index": 0, "function": {"arguments": '"a"}'}},
    ]
    chunks = [delta(tool_calls=[{**piece, **signed}]) for piece in pieces]
    [call] = (await ask_again([stream(*chunks, END), stream(delta(content="done"), END)]))[2]["tool_calls"]
    assert (call["extra_content"], call["function"]["arguments"]) == (signed["extra_content"], '{"text": "a"}')


async def test_fields_of_a_whole_reply_return_to_their_endpoint() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "reasoning_content": "need it",
        "audio": None,
    }
    messages = await ask_again([whole(message), whole({"content": "done"})], streaming=False)
    assert messages[2]["reasoning_content"] == "need it"
    assert "audio" not in messages[2]


async def test_fields_go_to_no_other_endpoint() -> None:
    own = {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [{**CALL, "extra_content": {"s": "S"}}]}
    async with serving([stream(END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0)
        origins = [build_origin(model.address, "m"), build_origin(model.address, "another model"), None]
        for origin in origins:
            message = own if origin is None else {**own, ORIGIN: origin}
            assert [chunk async for chunk in model.stream(ModelRequest([message]))]
        await model.aclose()
    returned, foreign, by_caller = [body["messages"][0] for body in server.bodies]
    assert returned == own
    assert foreign == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{key: CALL[key] for key in ("id", "type", "function")}],
    }
    # The caller wrote the message itself and knows its server.
    assert by_caller == own


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_that_refuses_its_own_fields_gets_the_messages_without_them(status: int) -> None:
    def reply(number: int, body: dict[str, Any]) -> bytes:
        if any("reasoning" in message for message in body["messages"]):
            return answer(status, {"error": {"message": "Extra inputs are not permitted"}})
        return stream(delta(reasoning="r"), of_call() if number == 1 else delta(content="done"), END)

    async with serving(reply) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        result = await Agent(model, NativeDialect(), [build_spec("echo")], run_echo).run("go")
        await model.aclose()
    assert result.answer == "done"
    assert len(server.bodies) == 3


async def test_a_refusal_for_another_reason_keeps_its_message() -> None:
    replies = [
        answer(400, {"error": {"message": "the image is too large"}}),
        answer(400, {"error": {"message": "reasoning is missing"}}),
    ]
    async with serving(replies) as server:
        model = OpenAIModel("m", server.url, None, 5.0, retries=0)
        with pytest.raises(ModelRefused, match="too large"):
            [
                chunk
                async for chunk in model.stream(ModelRequest([{"role": "assistant", "content": "", "reasoning": "r"}]))
            ]
        await model.aclose()


HOSTILE: list[Chunk] = [
    delta(x="a" * (MAX_CHARS + 1)),
    delta(**{f"field{number}": "a" * 1000 for number in range(5000)}),
    delta(x=[[]] * 1_100_000),
    delta(x=json.loads('{"a":' * 40 + "1" + "}" * 40)),
    delta(x=json.loads("[" * 40 + "1" + "]" * 40)),
]


@pytest.mark.parametrize("chunk", HOSTILE, ids=range(len(HOSTILE)))
def test_fields_above_the_limits_are_dropped(chunk: Chunk) -> None:
    assembler = NativeCallAssembler()
    for part in (delta(reasoning="r"), chunk, delta(content="done")):
        assembler.feed(part)
    reply = assembler.finish()
    assert (reply.text, reply.fields) == ("done", {})


def test_a_long_reasoning_is_merged_in_linear_time() -> None:
    assembler = NativeCallAssembler()
    for _ in range(200_000):
        assembler.feed(delta(reasoning_content="word ", reasoning_details=[{"type": "t", "index": 0, "text": "word "}]))
    fields = assembler.finish().fields
    assert fields["reasoning_details"][0]["text"] == fields["reasoning_content"] == "word " * 200_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"a": object()}, [object()], {1: 2}])
def test_values_that_are_no_json_are_left_out(value: Any) -> None:
    assembler = NativeCallAssembler()
    assembler.feed(delta(x=value))
    json.dumps(assembler.finish().fields, allow_nan=False)


class Echo:
    """A tool that repeats a text."""

    name = "echo"
    description = "Repeat a text"

    async def _run(self, text: str = "") -> str:
        return text


async def test_agents_in_messages_return_the_fields() -> None:
    first = [delta(reasoning="r"), of_call(extra_content={"s": "S"})]
    async with serving([stream(*first, END), stream(delta(content="done"), END)]) as server:
        model = OpenAIModel("m", server.url, None, 5.0)
        await CustomAgent(ToolAgent(model).bind_tools([Echo()])).run("go")
        await model.aclose()
    message = server.bodies[1]["messages"][1]
    assert (message["reasoning"], message["tool_calls"][0]["extra_content"]) == ("r", {"s": "S"})
    assert ORIGIN not in message


@pytest.mark.parametrize(
    "reply",
    [
        {"content": '{"tool": "echo", "arguments": {}}', "reasoning_content": "r"},
        SimpleNamespace(content='{"tool": "echo", "arguments": {}}', model_extra={"reasoning_content": "r"}),
        SimpleNamespace(content='{"tool": "echo", "arguments": {}}', additional_kwargs={"reasoning_content": "r"}),
    ],
    ids=["mapping", "OpenAI's SDK", "LangChain"],
)
async def test_chat_functions_get_the_fields_of_their_replies_back(reply: Any) -> None:
    requests: list[list[dict[str, Any]]] = []

    def chat(messages: list[dict[str, Any]]) -> Any:
        requests.append(messages)
        return reply if len(requests) == 1 else '{"tool": null, "reply": "done"}'

    await run_tool_loop({"chat": chat, "tool_registry": create_tool_registry([Echo()])}, "s1", "go")
    assert requests[1][2]["reasoning_content"] == "r"


async def test_a_model_class_of_the_caller_gets_the_fields_back() -> None:
    requests: list[ModelRequest] = []

    class Own:
        name = "own"

        async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
            requests.append(request)
            for chunk in [delta(reasoning="r"), of_call()] if len(requests) == 1 else [delta(content="done")]:
                yield chunk

        async def aclose(self) -> None:
            """Close nothing."""

    await Agent(Own(), NativeDialect(), [build_spec("echo")], run_echo).run("go")
    assert requests[1].messages[2]["reasoning"] == "r"


@pytest.mark.parametrize(("chunks", "fields"), [case[1:] for case in REPLIES], ids=[case[0] for case in REPLIES])
def test_the_log_of_a_run_has_few_chunks_for_many_deltas(chunks: list[Chunk], fields: dict[str, Any]) -> None:
    many = [part for chunk in chunks for part in [chunk] * (20 if chunk is chunks[-2] else 1)]
    joined = join_chunks(many)
    first, second = NativeCallAssembler(), NativeCallAssembler()
    for chunk in many:
        first.feed(chunk)
    for chunk in joined:
        second.feed(chunk)
    assert first.finish() == second.finish()
    assert not fields or len(joined) <= 3


def test_the_transcript_of_a_durable_run_has_the_fields() -> None:
    record = RunRecord(
        batch="", item=BatchItem(custom_id="i", line=1, url=RUNS_URL, work=RunBody(instruction="go")), state="running"
    )
    entries = [ModelReplied(run="r1", chunks=(delta(reasoning="r"), of_call(extra_content={"s": "S"})))]
    message = build_transcript("r1", record, entries)[1]
    assert (message["reasoning"], message["tool_calls"][0]["extra_content"]) == ("r", {"s": "S"})
