"""A file as the answer to a request: in pieces, each taken before the next is handed over."""

from collections.abc import Mapping
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 256 * 1024


class FileAnswer(Response):
    """`held`: what is let go when the file has been sent, or its client has gone."""

    media_type = "application/octet-stream"

    def __init__(self, data: bytes, headers: Mapping[str, str], held: AsyncExitStack) -> None:
        super().__init__(headers={**headers, "Content-Length": str(len(data))})
        self._data = memoryview(data)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, len(self._data), PIECE_BYTES):
                await send(
                    {
                        "type": "http.response.body",
                        "body": bytes(self._data[start : start + PIECE_BYTES]),
                        "more_body": True,
                    }
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})
