"""A loopback chat endpoint that answers as a test specifies, byte by byte, and sleeps that take no time."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from toolcrew.contract.errors import ModelUnavailable
from toolcrew.orchestrator.dialects.model import Chunk, Model, ModelRequest

Answer = Callable[[int, dict[str, Any]], bytes]
"""(number of the request, its body) -> the bytes to send. The connection is closed afterwards."""

HELLO: Chunk = {"choices": [{"index": 0, "delta": {"content": "hé\U0001f600"}, "finish_reason": None}]}
ROLE: Chunk = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END: Chunk = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE: Chunk = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def stream(*chunks: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + "".join(lines).encode()


def cut_stream(*chunks: Any) -> bytes:
    """Return a stream whose connection breaks before the end that its head announces."""
    return stream(*chunks, done=False).replace(b"connection: close", b"content-length: 99999")


def answer(status: int, body: Any, content_type: str = "application/json", **headers: str) -> bytes:
    payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = {"content-type": content_type, "content-length": str(len(payload)), "connection": "close"}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + payload


class Server:
    """A loopback endpoint that answers with `answer` and records the requests. `models`: the list of models. `gate`:
    answers wait until it is set.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.models: bytes = b""
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get "):
            writer.write(self.models)
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.heads.append(head)
            number = len(self.bodies)
            await self.gate.wait()
            writer.write(self._answer(number, self.bodies[number - 1]))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(answer: Answer | Sequence[bytes]) -> AsyncIterator[Server]:
    """Run a server. The last answer of a list is repeated."""
    server = Server(answer if callable(answer) else lambda number, _: answer[min(number, len(answer)) - 1])
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        yield server


class RecordedSleep:
    """A sleep that returns at once and records the requested duration."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.kept.append(seconds)


async def read(model: Model, **extra: Any) -> list[Chunk]:
    """Return the chunks of one reply, and close the model."""
    try:
        return [chunk async for chunk in model.stream(ModelRequest([{"role": "user", "content": "hi"}], extra=extra))]
    finally:
        await model.aclose()


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def failure(awaitable: Awaitable[object]) -> ModelUnavailable:
    """Return the error that the operator reads."""
    with pytest.raises(ModelUnavailable) as caught:
        await awaitable
    return caught.value
