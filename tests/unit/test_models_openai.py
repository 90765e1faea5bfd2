"""OpenAIModel against real loopback servers, good and bad. The operator reads one sentence, never the key."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contract.errors import ModelUnavailable
from orchestrator.models.base import ModelRequest
from orchestrator.models.openai import OpenAIModel

KEY = "sk-very-secret-key"
Answer = Callable[[int, dict[str, Any]], bytes]
"""(number of the request, its body) -> the bytes to send; then the connection is closed."""

HELLO = {"choices": [{"index": 0, "delta": {"content": "hé\U0001f600"}, "finish_reason": None}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def stream(*chunks: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + "".join(lines).encode()


def refusal(status: int, body: Any, content_type: str = "application/json") -> bytes:
    payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(payload)}\r\nretry-after-ms: 1\r\nconnection: close\r\n\r\n"
    return head.encode() + payload


class Server:
    """A loopback endpoint that answers as `answer` says and keeps the requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(self._answer(len(self.bodies), self.bodies[-1]))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    server = Server(answer)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        yield server


async def ask(url: str, *, retries: int = 0) -> list[dict[str, Any]]:
    model = OpenAIModel("m", url, KEY, 5.0, retries=retries)
    try:
        return [chunk async for chunk in model.stream(ModelRequest([{"role": "user", "content": "hi"}]))]
    finally:
        await model.aclose()


async def failure(awaitable: Awaitable[object]) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        await awaitable
    return str(caught.value)


async def test_chunks_come_as_the_server_wrote_them() -> None:
    async with serving(lambda *_: stream(HELLO, END, USAGE)) as server:
        assert await ask(server.url) == [HELLO, END, USAGE]


async def test_the_request_names_the_model_and_asks_for_usage_and_has_no_empty_tools() -> None:
    async with serving(lambda *_: stream(END)) as server:
        await ask(server.url)
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert "tools" not in server.bodies[0]


async def test_extra_fields_of_model_and_request_go_into_the_body_and_the_requests_win() -> None:
    async with serving(lambda *_: stream(END)) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0, {"seed": 7, "top_k": 1})
        [_] = [chunk async for chunk in model.stream(ModelRequest([], [{"type": "function"}], {"seed": 8}))]
        await model.aclose()
        assert (server.bodies[0]["seed"], server.bodies[0]["top_k"], server.bodies[0]["tools"]) == (8, 1, [{"type": "function"}])


async def test_a_server_that_refuses_usage_is_asked_again_without_and_remembered() -> None:
    def answer(number: int, body: dict[str, Any]) -> bytes:
        return refusal(400, {"error": {"message": "unknown field stream_options"}}) if "stream_options" in body else stream(END)

    async with serving(answer) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0, retries=0)
        for _ in range(2):
            assert [chunk async for chunk in model.stream(ModelRequest([]))] == [END]
        await model.aclose()
        assert ["stream_options" in body for body in server.bodies] == [True, False, False]


async def test_a_server_that_is_busy_at_first_is_asked_again() -> None:
    async with serving(lambda number, _: refusal(503, {}) if number == 1 else stream(END)) as server:
        assert await ask(server.url, retries=1) == [END]


async def test_a_begun_stream_is_never_asked_again() -> None:
    async with serving(lambda *_: stream(HELLO, done=False)) as server:
        await failure(ask(server.url, retries=2))
        assert len(server.bodies) == 1


async def test_chunks_before_a_break_are_given_out() -> None:
    async with serving(lambda *_: stream(HELLO, done=False)) as server:
        model = OpenAIModel("m", server.url, KEY, 5.0)
        chunks = aiter(model.stream(ModelRequest([])))
        assert await anext(chunks) == HELLO
        await failure(anext(chunks))
        await model.aclose()


ECHO = {"error": {"message": f"Incorrect key {KEY} provided. " + "x" * 2000}}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal(401, ECHO), "refuses the API key: check OPENAI_API_KEY"),
        (refusal(403, ECHO), "refuses the API key"),
        (refusal(404, {"error": {"message": "no such model"}}), "does not know the model 'm'"),
        (refusal(429, ECHO), "rate or quota: wait"),
        (refusal(500, "<html>Bad gateway</html>", "text/html"), "failed with status 500"),
        (refusal(400, ECHO), "refused the request: Incorrect key ***"),
        (refusal(400, "<html>Nope</html>", "text/html"), "refused the request"),
        (stream(), "ended its reply without a finish_reason"),
        (refusal(200, "<html>Welcome</html>", "text/html"), "ended its reply without a finish_reason"),
        (stream(HELLO, done=False), "ended its reply without a finish_reason"),
        (stream(HELLO, {"error": {"message": "out of memory"}}), "out of memory"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {broken\n\n", "broke off its reply"),
        (stream(HELLO, done=False).replace(b"connection: close", b"content-length: 9999"), "broke off its reply"),
        (b"", "cannot be reached"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be reached"),
    ],
)
async def test_each_failure_is_a_sentence_that_says_what_to_do_and_hides_the_key(answer: bytes, words: str) -> None:
    async with serving(lambda *_: answer) as server:
        sentence = await failure(ask(server.url))
    assert words in sentence
    assert KEY not in sentence
    assert len(sentence) < 600


async def test_a_dead_endpoint_is_named() -> None:
    async with serving(lambda *_: b"") as server:
        url = server.url
    assert f"the model at {url} cannot be reached" in await failure(ask(url))


async def test_a_silent_endpoint_times_out() -> None:
    hung = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        model = OpenAIModel("m", url, KEY, 0.2, retries=0)
        sentence = await failure(anext(aiter(model.stream(ModelRequest([])))))
        await model.aclose()
        hung.set()
    assert "did not answer in time" in sentence


async def test_credentials_in_the_url_are_not_shown() -> None:
    sentence = await failure(ask("http://user:hunter2@127.0.0.1:9/v1?key=hunter3"))
    assert "hunter" not in sentence


async def test_a_server_without_keys_needs_none() -> None:
    async with serving(lambda *_: stream(END)) as server:
        model = OpenAIModel("m", server.url, None, 5.0)
        assert [chunk async for chunk in model.stream(ModelRequest([]))] == [END]
        await model.aclose()
