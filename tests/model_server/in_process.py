"""The model server in the process and loop of a test, with a client. For tests of the server and of its clients."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.model_server.script import parse_script
from tests.model_server.service import Chat
from tests.model_server.wire import Connection
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler, NativeReply
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.retries import RetryPolicy

Lines = Sequence[dict[str, Any]]
OK = {"kind": "rule", "reply": {"text": "ok"}}
TRUST_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""The TLS settings of clients of loopback, which use no TLS. Loading the system's authorities takes longer than
everything else in such a test.
"""


class WatchedChat(Chat):
    """A chat service under observation. `gone`: a client disconnected before its answer was complete. `clock`: the
    time that faults use.
    """

    def __init__(self, *lines: dict[str, Any]) -> None:
        self.gone = asyncio.Event()
        self.clock = 0.0
        super().__init__(parse_script("\n".join(json.dumps(line) for line in lines)), now=lambda: self.clock)

    def left(self) -> None:
        super().left()
        self.gone.set()


class Playing:
    """A server in this process, and a client of the server."""

    def __init__(self, chat: WatchedChat, port: int, client: httpx.AsyncClient) -> None:
        self.chat = chat
        self.port = port
        self.client = client
        self.url = f"http://127.0.0.1:{port}/v1"

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"model": "m", "messages": list(messages), **fields})

    async def say(self, text: str, **fields: Any) -> str:
        """Send a message and return the text of the complete reply."""
        reply = await self.ask(user(text), **fields)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def model(self, attempts: int = 1, *, timeout_s: float = 60, streaming: bool = True) -> OpenAIModel:
        return OpenAIModel(
            "m", self.url, timeout_s=timeout_s, retries=RetryPolicy(attempts=attempts, base_s=0.0), streaming=streaming
        )

    @property
    def stats(self) -> dict[str, Any]:
        return self.chat.counters.tell()


@asynccontextmanager
async def playing(*lines: dict[str, Any]) -> AsyncIterator[Playing]:
    chat = WatchedChat(*lines)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(chat), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", verify=TRUST_NOBODY, trust_env=False, timeout=60
        ) as client,
    ):
        yield Playing(chat, port, client)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def read(model: OpenAIModel, *messages: dict[str, Any], tools: Lines = ()) -> NativeReply:
    """Return a reply as the orchestrator's own client parses the reply."""
    assembler = NativeCallAssembler()
    try:
        async for chunk in model.stream(ModelRequest(list(messages), list(tools))):
            assembler.feed(chunk)
    finally:
        await model.aclose()
    return assembler.finish(strict=False)
