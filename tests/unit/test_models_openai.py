"""OpenAIModel against real loopback servers: requests, replies, and one error message per failure, never with the
key.
"""

import asyncio
from typing import Any

import pytest

from contract.errors import ModelInterrupted
from orchestrator.dialects.model import Chunk, ModelRequest
from orchestrator.models.openai import OpenAIModel
from tests.model_endpoint import END, HELLO, Answer, answer, cut_stream, failure, read, serving, stream, text_of

KEY = "sk-very-secret-key"


async def ask(url: str, *, streaming: bool = True) -> list[Chunk]:
    return await read(OpenAIModel("m", url, KEY, 5.0, retries=0, streaming=streaming))


def refusing(field: str, otherwise: bytes = stream(END)) -> Answer:
    """Return a server that does not accept the field `word`."""

    def reply(_: int, body: dict[str, Any]) -> bytes:
        return answer(400, {"error": {"message": f"unknown field {field}"}}) if field in body else otherwise

    return reply


async def test_the_request_names_the_model_and_asks_for_usage_and_has_no_empty_tools() -> None:
    async with serving([stream(END)]) as server:
        await ask(server.url)
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert "tools" not in server.bodies[0]


async def test_extra_fields_of_model_and_request_go_into_the_body_and_the_requests_win() -> None:
    async with serving([stream(END)]) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0, {"seed": 7, "top_k": 1})
        [_] = [chunk async for chunk in model.stream(ModelRequest([], [{"type": "function"}], {"seed": 8}))]
        await model.aclose()
        assert server.bodies[0]["seed"] == 8
        assert server.bodies[0]["top_k"] == 1
        assert server.bodies[0]["tools"] == [{"type": "function"}]


async def test_a_server_that_refuses_usage_is_remembered() -> None:
    async with serving(refusing("stream_options")) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0, retries=0)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))] == [END]
        await model.aclose()
        assert ["stream_options" in body for body in server.bodies] == [True, False, False]


async def test_a_server_that_wants_the_newer_name_of_the_token_limit_gets_it() -> None:
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )

    def reply(_: int, body: dict[str, Any]) -> bytes:
        return answer(400, {"error": {"message": message}}) if "max_tokens" in body else stream(END)

    async with serving(reply) as server:
        assert await read(OpenAIModel("m", server.url, KEY, 5.0, retries=0), max_tokens=9) == [END]
        assert [body.get("max_completion_tokens") for body in server.bodies] == [None, 9]


async def test_text_in_parts_is_text_and_reasoning_among_them_is_not() -> None:
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


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("reply", "message"), REFUSALS)
async def test_each_failure_says_what_to_do_and_hides_the_key(reply: bytes, message: str, streaming: bool) -> None:
    async with serving([reply]) as server:
        sentence = str(await failure(ask(server.url, streaming=streaming)))
    assert message in sentence
    assert KEY[:10] not in sentence
    assert len(sentence) < 600


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (stream(), "ended its reply without a finish_reason"),
        (stream(HELLO, done=False), "ended its reply without a finish_reason"),
        (stream(HELLO, {"error": {"message": f"out of memory, {KEY}"}}), "out of memory, ***"),
        (stream({"object": "error", "message": "out of memory", "code": 400}), "out of memory"),
        (answer(200, {"choices": []}), "set TOOLCREW_MODEL_STREAMING=false"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {broken\n\n", "broke off its reply"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: " + b"[" * 200_000 + b"\n\n",
            "broke off its reply",
        ),
        (cut_stream(HELLO), "broke off its reply"),
    ],
)
async def test_each_failure_of_a_stream_is_a_sentence_and_hides_the_key(reply: bytes, message: str) -> None:
    async with serving([reply]) as server:
        sentence = str(await failure(ask(server.url)))
    assert message in sentence
    assert KEY not in sentence


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_number_of_more_digits_than_can_be_read_is_a_failure_of_the_model(streaming: bool) -> None:
    text = '{"choices": [], "created": ' + "9" * 5000 + "}"
    reply = stream(HELLO, done=False) + f"data: {text}\n\n".encode() if streaming else answer(200, text)
    async with serving([reply]) as server:
        error = await failure(ask(server.url, streaming=streaming))
    assert (isinstance(error, ModelInterrupted), "could not be called: ValueError" in str(error)) == (streaming, True)


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
