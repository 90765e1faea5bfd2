"""OpenAIModel against real loopback servers: requests, replies in a stream or complete, retries, and one error message
per failure, never with the key.
"""

import asyncio
import sys
from email.utils import formatdate
from typing import Any

import pytest

from tests.support.models.model_endpoint import (
    END,
    HELLO,
    ROLE,
    Answer,
    RecordedSleep,
    answer,
    cut_stream,
    failure,
    read,
    serving,
    stream,
    text_of,
)
from toolcrew.contract.errors import ContextWindowExceeded, ModelInterrupted, ModelRefused
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler, NativeReply
from toolcrew.orchestrator.dialects.reply_fields import ORIGIN
from toolcrew.orchestrator.models.chunks import EndFinder, has_content, normalize, split_reply
from toolcrew.orchestrator.models.failures import (
    AttemptFailure,
    FailedEndpoint,
    build_error,
    find_retry_delay,
    is_transient,
)
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.retries import RetryPolicy, parse_retry_after

KEY = "sk-very-secret-key"


async def ask(url: str, *, streaming: bool = True) -> list[Chunk]:
    return await read(OpenAIModel("m", url, KEY, 5.0, retries=0, streaming=streaming))


def refuse_field(field: str, otherwise: bytes = stream(END)) -> Answer:
    """Return a server that does not accept the field `word`."""

    def reply(_: int, body: dict[str, Any]) -> bytes:
        return answer(400, {"error": {"message": f"unknown field {field}"}}) if field in body else otherwise

    return reply


async def test_request_asks_for_usage_and_omits_empty_tools() -> None:
    async with serving([stream(END)]) as server:
        await ask(server.url)
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert "tools" not in server.bodies[0]


async def test_extra_fields_of_the_request_override_those_of_the_model() -> None:
    async with serving([stream(END)]) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0, {"seed": 7, "top_k": 1})
        [_] = [chunk async for chunk in model.stream(ModelRequest([], [{"type": "function"}], {"seed": 8}))]
        await model.aclose()
        assert server.bodies[0]["seed"] == 8
        assert server.bodies[0]["top_k"] == 1
        assert server.bodies[0]["tools"] == [{"type": "function"}]


async def test_stream_options_are_omitted_after_the_server_refuses_them() -> None:
    async with serving(refuse_field("stream_options")) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0, retries=0)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))] == [END]
        await model.aclose()
        assert ["stream_options" in body for body in server.bodies] == [True, False, False]


async def test_max_completion_tokens_replaces_a_refused_max_tokens() -> None:
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )

    def reply(_: int, body: dict[str, Any]) -> bytes:
        return answer(400, {"error": {"message": message}}) if "max_tokens" in body else stream(END)

    async with serving(reply) as server:
        assert await read(OpenAIModel("m", server.url, KEY, 5.0, retries=0), max_tokens=9) == [END]
        assert [body.get("max_completion_tokens") for body in server.bodies] == [None, 9]


async def test_content_parts_are_joined_without_reasoning_parts() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "yes"}]
    async with serving([stream({"choices": [{"index": 0, "delta": {"content": parts}}]}, END)]) as server:
        assert text_of(await ask(server.url)) == "yes"


ECHO = {"error": {"message": f"Incorrect key {KEY} provided. " + "x" * 2000}}
CUT_ECHO = {"error": {"message": "x" * 290 + KEY}}
"""The key lies where the server's words are cut."""

REFUSALS = [
    (answer(401, ECHO), "refuses the API key: check OPENAI_API_KEY"),
    (answer(403, ECHO), "refuses the API key"),
    (answer(404, {"error": {"message": "no such model"}}), "does not know the model 'm'"),
    (answer(404, {"error": {"message": "No endpoints found that support tool use"}}), "support tool use"),
    (answer(429, ECHO), "rate limit or quota: wait"),
    (answer(429, {"error": {"code": "insufficient_quota", "message": "You exceeded"}}), "quota is used up"),
    (answer(500, "<html>Bad gateway</html>", "text/html"), "failed with status 500: try again"),
    (answer(400, ECHO), "refused the request: Incorrect key ***"),
    (answer(400, CUT_ECHO), "refused the request: xxx"),
    (answer(400, {"error": "bad field"}), "refused the request: bad field"),
    (answer(422, {"detail": [{"msg": "Field required"}]}), "Field required"),
    (answer(400, "<html>Nope</html>", "text/html"), "refused the request: the answer is not JSON"),
    (answer(200, "<html>Welcome</html>", "text/html"), "did not answer as a chat endpoint does"),
    (b"", "cannot be reached"),
    (b"SSH-2.0-OpenSSH\r\n", "cannot be reached"),
]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: "
BROKEN_STREAMS = [
    (stream(), "ended its reply without a finish_reason"),
    (stream(HELLO, done=False), "ended its reply without a finish_reason"),
    (stream(HELLO, {"error": {"message": f"out of memory, {KEY}"}}), "out of memory, ***"),
    (stream({"object": "error", "message": "out of memory", "code": 400}), "out of memory"),
    (answer(200, {"choices": []}), "did not answer as a chat endpoint does"),
    (answer(200, {"detail": f"no such key {KEY}"}), "(no such key ***)"),
    (answer(200, {"code": 429, "msg": "too many requests"}), "too many requests"),
    (answer(200, {"base_resp": {"status_msg": "log in again"}, "choices": None}), "log in again"),
    (answer(200, "<p>blocked</p>", "text/html"), "did not answer as a chat endpoint does"),
    (stream({"detail": f"no such key {KEY}"}, done=False), "no such key ***"),
    (stream(HELLO, {"message": "out of memory"}), "out of memory"),
    (HEAD + b"{broken\n\n", "interrupted its reply"),
    (HEAD + b"[" * 200_000 + b"\n\n", "interrupted its reply"),
    (cut_stream(HELLO), "interrupted its reply"),
    (stream(HELLO, done=False) + b'data: {"created": ' + b"9" * 5000 + b"}\n\n", "could not be called: ValueError"),
]
BROKEN_REPLIES = [
    (answer(200, '{"created": ' + "9" * 5000 + "}"), "could not be called: ValueError"),
    (answer(200, "{broken"), "interrupted its reply"),
    (answer(200, ""), "interrupted its reply"),
    (answer(200, {"choices": []}), "did not answer as a chat endpoint does"),
    (answer(200, {"error": {"message": f"no such key {KEY}", "code": 401}}), "no such key ***"),
    (answer(200, {"error": f"busy with {KEY}"}), "busy with ***"),
    (answer(200, "{}").replace(b"content-length: ", b"content-length: 9"), "cannot be reached"),
]


@pytest.mark.parametrize(
    ("reply", "message", "streaming"),
    [
        *[(*refusal, streaming) for refusal in REFUSALS for streaming in (True, False)],
        *[(*broken, True) for broken in BROKEN_STREAMS],
        *[(*broken, False) for broken in BROKEN_REPLIES],
    ],
)
async def test_failure_message_says_what_to_do_and_hides_the_key(reply: bytes, message: str, streaming: bool) -> None:
    async with serving([reply]) as server:
        sentence = str(await failure(ask(server.url, streaming=streaming)))
    assert message in sentence
    assert KEY[:10] not in sentence
    assert len(sentence) < 600


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_silent_endpoint_times_out(streaming: bool) -> None:
    hung = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        error = await failure(read(OpenAIModel("m", url, KEY, 0.2, retries=0, streaming=streaming)))
        hung.set()
    assert "did not answer in time" in str(error)


@pytest.mark.parametrize(
    "reply",
    [
        answer(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}}]}),
        stream({"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}),
        stream({"choices": [{"index": 0, "delta": {"content": "yes"}}]}, END).replace(b"text/event-stream", b"application/json"),
    ],
    ids=["one JSON value", "a message in a chunk", "a stream named JSON"],
)  # fmt: skip
async def test_a_streamed_reply_may_have_another_form(reply: bytes) -> None:
    async with serving([reply]) as server:
        assert text_of(await ask(server.url)) == "yes"


async def test_a_message_after_deltas_repeats_them() -> None:
    deltas = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in ("y", "es")]
    repeated = {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}
    async with serving([stream(*deltas, repeated)]) as server:
        chunks = await ask(server.url)
    assert [chunk["choices"][0].get("delta") for chunk in chunks] == [{"content": "y"}, {"content": "es"}, None]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"type": "text", "text": "yes"}, "yes"),
        (["ye", {"type": "output_text", "text": "s"}], "yes"),
        (42, "42"),
        (0, "0"),
        (False, "false"),
        ({"tool": None, "reply": "é"}, '{"tool": null, "reply": "é"}'),
        ([{"type": "thinking", "thinking": "hm"}], ""),
        ([], ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_content_of_any_type_is_its_text(content: Any, text: str, streaming: bool) -> None:
    reply = stream({"choices": [{"index": 0, "delta": {"content": content}}]}, END)
    async with serving([reply if streaming else answer(200, whole({"content": content}))]) as server:
        assert text_of(await ask(server.url, streaming=streaming)) == text


# Replies that arrive complete


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


def test_invalid_tool_call_entries_of_a_whole_reply_are_skipped() -> None:
    assert [tool_call.name for tool_call in assemble(whole({"tool_calls": [None, "x", call("one", {})]})).calls] == [
        "one"
    ]


def test_refusal_is_used_as_text_only_without_content() -> None:
    assert assemble(whole({"content": None, "refusal": "I cannot"})).text == "I cannot"
    assert assemble(whole({"content": "yes", "refusal": "I cannot"})).text == "yes"


@pytest.mark.parametrize(
    "chunk", [{}, {"choices": None}, {"choices": 7}, {"choices": [None, 7]}, {"choices": [{"delta": "x"}]}]
)
def test_chunk_with_another_structure_passes_unchanged(chunk: Chunk) -> None:
    assert normalize(chunk) == chunk
    assert not has_content(chunk)
    end = EndFinder()
    end.feed(chunk)
    assert not end.has_ended


async def test_model_without_streaming_reads_one_whole_reply() -> None:
    async with serving([answer(200, whole({"content": "hé\U0001f600"}, usage={"prompt_tokens": 3}))]) as server:
        chunks = await read(OpenAIModel("m", server.url, streaming=False, retries=0))
        assert (server.bodies[0]["stream"], "stream_options" in server.bodies[0]) == (False, False)
    assert text_of(chunks) == "hé\U0001f600"


# Retries


NOW = 1_800_000_000.0


def now() -> float:
    return NOW


@pytest.fixture
def waits() -> RecordedSleep:
    return RecordedSleep()


@pytest.mark.parametrize("invalid", [{"attempts": 0}, {"base_s": -1}, {"max_wait_s": -1}, {"factor": 0.5}])
def test_invalid_retry_policy_is_refused(invalid: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="use at least 1 attempt"):
        RetryPolicy(**invalid)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7),
        ({"retry-after": formatdate(NOW + 30, usegmt=True)}, 30),
        ({"retry-after": formatdate(NOW - 30, usegmt=True)}, 0),
        ({"retry-after": formatdate(NOW + 930, usegmt=True), "date": formatdate(NOW + 900, usegmt=True)}, 30),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e3"}, None),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": "Wed, 99 Foo 2026 99:99:99 GMT"}, None),
        ({"retry-after": "9" * 400}, float("inf")),
    ],
)
def test_retry_after_header_is_parsed(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, now) == seconds


# Against a server


def build(url: str, waits: RecordedSleep, *, attempts: int = 3, streaming: bool = True) -> OpenAIModel:
    return OpenAIModel("m", url, KEY, 5.0, retries=RetryPolicy(attempts=attempts, sleep=waits), streaming=streaming)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
async def test_transient_status_is_retried(status: int, waits: RecordedSleep) -> None:
    async with serving([answer(status, {}), stream(END)]) as server:
        assert await read(build(server.url, waits)) == [END]
    [wait] = waits.kept
    assert 0 <= wait <= 0.5


@pytest.mark.parametrize(
    ("reply", "wait_s"), [(answer(429, {}, retry_after="7"), 7.0), (answer(503, {}, retry_after_ms="1500"), 1.5)]
)
async def test_retry_after_delays_all_requests(reply: bytes, wait_s: float, waits: RecordedSleep) -> None:
    async with serving([reply, stream(END)]) as server:
        model = build(server.url, waits)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))] == [END]
        await model.aclose()
    assert waits.kept == pytest.approx([wait_s, wait_s], abs=0.5)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(429, {"error": {"code": "insufficient_quota", "message": "pay"}}), "quota is used up"),
        (answer(503, {}, x_should_retry="false"), ""),
        (answer(429, {}, retry_after="3600"), "a wait of 3600 s, and the limit is 60 s"),
    ],
    ids=["no rate limit", "the server says so", "too long"],
)
async def test_permanent_error_is_not_retried(reply: bytes, message: str, waits: RecordedSleep) -> None:
    # The second request may be the one that shows whether the server denies every request.
    async with serving([reply, reply, stream(END)]) as server:
        assert message in str(await failure(read(build(server.url, waits))))
    assert waits.kept == []


async def test_error_after_the_last_attempt_reports_the_number_of_attempts(waits: RecordedSleep) -> None:
    async with serving([answer(503, {})]) as server:
        assert "(tried 3 times)" in str(await failure(read(build(server.url, waits))))
        assert len(server.bodies) == 3
    assert len(waits.kept) == 2


@pytest.mark.parametrize(
    "broken",
    [
        stream(done=False),
        stream(ROLE, done=False),
        cut_stream(ROLE),
        stream({"error": {"message": "overloaded", "code": 503}}),
        stream({"error": {"message": "something broke"}}),
        stream({"object": "error", "message": "engine died", "code": 500}),
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {broken\n\n",
    ],
)
async def test_interruption_before_content_is_retried(broken: bytes, waits: RecordedSleep) -> None:
    async with serving([broken, stream(ROLE, HELLO, END)]) as server:
        assert await read(build(server.url, waits)) == [ROLE, HELLO, END]
    assert len(waits.kept) == 1


CALL = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "x"}}]}}]}
THOUGHT = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}


@pytest.mark.parametrize("part", [HELLO, CALL, THOUGHT])
@pytest.mark.parametrize("is_cut", [True, False])
async def test_interruption_after_content_is_an_error(part: Chunk, is_cut: bool, waits: RecordedSleep) -> None:
    chunks: list[Chunk] = []

    async def keep(model: OpenAIModel) -> None:
        async for chunk in model.stream(ModelRequest([])):
            chunks.append(chunk)

    async with serving([cut_stream(ROLE, part) if is_cut else stream(ROLE, part, done=False)]) as server:
        model = build(server.url, waits)
        with pytest.raises(ModelInterrupted):
            await keep(model)
        await model.aclose()
        assert len(server.bodies) == 1
    assert [{name: chunk[name] for name in chunk if name != ORIGIN} for chunk in chunks] == [ROLE, part]


@pytest.mark.parametrize(
    "chunks",
    [
        [{"choices": [], "usage": {"prompt_tokens": 3}}, HELLO],
        [HELLO, {"choices": [], "usage": {"prompt_tokens": 3}}, HELLO],
        [{"choices": [{"index": 0, "delta": {"content": "he"}, "finish_reason": "null"}]}],
        [{"choices": [{"index": 0, "delta": {"content": "he"}, "finish_reason": "None"}]}],
    ],
    ids=["usage first", "usage between", "a reason null", "a reason None"],
)
async def test_a_cut_reply_without_a_real_end_is_an_interruption(chunks: list[Chunk]) -> None:
    async with serving([stream(*chunks, done=False)]) as server:
        assert isinstance(await failure(ask(server.url)), ModelInterrupted)


async def test_server_error_after_content_is_an_interruption_or_a_window_error(
    waits: RecordedSleep,
) -> None:
    async with serving([stream(HELLO, {"error": {"message": f"out of memory {KEY}", "code": 500}})]) as server:
        error = await failure(read(build(server.url, waits)))
    assert isinstance(error, ModelInterrupted)
    assert "out of memory ***" in str(error)
    body = {"error": {"message": "context full", "type": "exceed_context_size_error", "n_ctx": 512}}
    async with serving([stream(HELLO, body)]) as server:
        error = await failure(read(build(server.url, waits)))
    assert isinstance(error, ContextWindowExceeded)
    assert error.limit_tokens == 512


# The meaning of a refusal


ENDPOINT = FailedEndpoint("http://host/v1", "m", "sk-secret")

TOO_LONG: list[tuple[int, Any, int | None]] = [
    (400, {"message": "Your input exceeds the context window of this model.", "code": "context_length_exceeded"}, None),
    (400, {"message": "This model's maximum context length is 128000 tokens. However, it has 130000 tokens."}, 128000),
    (400, {"message": "cut", "type": "exceed_context_size_error", "n_prompt_tokens": 1407, "n_ctx": 256}, 256),
    (
        400,
        {"message": "request (9412 tokens) exceeds the available context size (8192 tokens), try increasing it"},
        8192,
    ),
    (
        500,
        {"message": "the request exceeds the available context size. try increasing the context size", "code": 500},
        None,
    ),
    (400, {"message": "You passed 5000 input tokens. However, the model's context length is only 4096"}, 4096),
    (400, {"message": "The decoder prompt (length 5000) is longer than the maximum model length of 4096."}, 4096),
    (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}, 4096),
    (400, {"message": "the input length exceeds the context length"}, None),
    (400, {"message": "prompt too long; exceeded max context length by 120 tokens"}, None),
    (500, {"message": "Requested tokens (516) exceed context window of 512"}, 512),
    (400, {"message": "Prompt contains 40000 tokens, too large for model with 32768 maximum context length"}, 32768),
    (400, {"message": "prompt is too long: 210000 tokens > 200000 maximum"}, 200000),
    (400, {"message": "The input token count (1190) exceeds the maximum number of tokens allowed (1000)."}, 1000),
    (422, {"message": "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"}, 4096),
    (400, {"message": "This model's maximum prompt length is 131072 but the request contains 137032 tokens."}, 131072),
    (413, {"message": "Please reduce the length of the messages or completion."}, None),
    (400, "<p>maximum context length is 77 tokens</p>", 77),
    (400, {"message": f"maximum context length is {'9' * 100_000} tokens"}, None),
    (400, {"message": "Invalid request: Your request exceeded model token limit: 131072 (requested: 150000)"}, 131072),
    (400, {"message": "Prompt exceeds max length", "code": "1261"}, None),
    (400, {"message": "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 98304]"}, 98304),
    (400, {"message": "invalid params, context window exceeds limit (2013)"}, None),
    (400, {"message": "Input is too long for requested model."}, None),
    (400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 4081"}, None),
    (413, {"code": "tokens_limit_reached", "message": "Request body too large. Max size: 8000 tokens."}, None),
    (400, {"code": 20015, "message": "length of prompt_tokens (40000) must be less than max_seq_len (32768)."}, 32768),
    (400, {"message": "the number of input tokens 5000 cannot exceed the total tokens limit 4096"}, None),
    (400, {"message": "The sum of prompt length (9000.0), query length (0) should not exceed max_num_tokens"}, None),
    (400, {"message": "Input length 200123 exceeds the maximum length of 131072 tokens"}, 131072),
    (400, {"message": "Unable to submit: the input token count is 15 but model only supports up to 10"}, 10),
    (400, {"message": "Total tokens of image and text exceed max message tokens."}, None),
    (400, {"message": "max_tokens must be at least 1, got -1245."}, None),
    (400, {"error_code": 336007, "error_msg": "Prompt tokens too long"}, None),
    (500, {"message": "Context size has been exceeded."}, None),
    (
        400,
        {
            "message": "Provider returned error",
            "metadata": {"raw": '{"error": {"message": "This model\'s maximum context length is 32768 tokens."}}'},
        },
        32768,
    ),
]


@pytest.mark.parametrize(("status", "body", "limit"), TOO_LONG)
def test_context_window_error_is_recognised_for_each_server(status: int, body: Any, limit: int | None) -> None:
    failure = AttemptFailure("status", status, body)
    error = build_error(failure, ENDPOINT)
    assert isinstance(error, ContextWindowExceeded)
    assert error.limit_tokens == limit
    assert not is_transient(failure)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "max_tokens must be at least 1"),
        (400, "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"),
        (429, "Rate limit reached: the maximum context length is 10 tokens a minute"),
        (404, "the model `maximum context length` does not exist"),
        (500, "The server had an error while processing your request"),
        (422, "context: field required"),
        (500, "context deadline exceeded"),
        (400, "Input validation error: max_new_tokens exceeds 512"),
        (422, "Input should be greater than or equal to 1"),
        (400, "Invalid 'input[3].id': string too long. Expected a string with maximum length 64"),
        (400, "input image exceeds 5 MB"),
        (400, "max_tokens is too large: 5000. This model supports at most 4096 completion tokens"),
        (400, "exceeded the limit of input tokens per minute"),
        (400, "the messages contain too many images"),
    ],
)
def test_other_errors_are_not_context_window_errors(status: int, message: str) -> None:
    assert not isinstance(
        build_error(AttemptFailure("status", status, {"message": message}), ENDPOINT), ContextWindowExceeded
    )


def test_an_error_of_a_gateway_has_the_reason_of_its_server() -> None:
    body = {"message": "Provider returned error", "code": 400, "metadata": {"raw": "the tool name sk-secret is bad"}}
    error = build_error(AttemptFailure("status", 400, body), ENDPOINT)
    assert "Provider returned error" in str(error)
    assert "the tool name *** is bad" in str(error)


async def test_a_delay_in_the_details_of_a_rate_limit_is_kept(waits: RecordedSleep) -> None:
    retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "6s"}
    limited = answer(429, [{"error": {"code": 429, "message": "slower", "details": [{"violations": []}, retry]}}])
    async with serving([limited, stream(END)]) as server:
        await read(build(server.url, waits))
    assert waits.kept == [pytest.approx(6.0, abs=1.0)]


@pytest.mark.parametrize(
    "details",
    [None, 7, [], [7], [{}], [{"retryDelay": 6}], [{"retryDelay": "-6s"}], [{"retryDelay": "9" * 5000 + "s"}]],
)
def test_other_details_have_no_delay(details: Any) -> None:
    assert find_retry_delay({"details": details}) is None


@pytest.mark.parametrize("status", [400, 413, 422, 501])
def test_refused_request_reports_the_reason_without_the_key(status: int) -> None:
    error = build_error(AttemptFailure("status", status, {"message": "no sk-secret\nhere"}), ENDPOINT)
    assert isinstance(error, ModelRefused)
    assert error.detail == "no *** here"
    assert "sk-secret" not in repr(ENDPOINT)


@pytest.mark.parametrize(
    "body", [None, [], 7, "", {"message": None}, {"message": {"a": 1}}, {"code": None, "type": []}]
)
def test_error_body_of_any_structure_gives_a_message(body: Any) -> None:
    assert "http://host/v1" in str(build_error(AttemptFailure("status", 400, body), ENDPOINT))
    assert is_transient(AttemptFailure("status", 503, body))


def test_deeply_nested_error_body_gives_a_message() -> None:
    body: dict[str, Any] = {}
    for _ in range(5000):
        body = {"message": body}
    message = str(build_error(AttemptFailure("status", 400, body), ENDPOINT))
    # Python 3.13 and later encode this depth, and the message has the beginning.
    assert ("nested too deep" if sys.version_info < (3, 13) else '{"message": {"message": ') in message
    assert len(message) < 2000
