"""Server-sent events: a stream of events to one client, which may be slow."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
COMMENT_INTERVAL_S = 15.0
"""Interval in seconds of keep-alive comments in a stream without events."""
WRITE_WITHIN_S = 30.0
"""Seconds after which a client that accepts no data is disconnected. The client reconnects with Last-Event-ID.
"""
RECONNECT_MS = 2000
"""Time in milliseconds after which a client reconnects to an interrupted stream."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_BEAT = b": \n\n"


@dataclass(frozen=True)
class ServerEvent:
    """An event of a stream. `id`: the position that a client sends to continue; None: not a
    position to continue from.
    """

    event: str
    data: Mapping[str, Any] | str
    id: str | None = None

    def encode(self) -> bytes:
        """Encode the event. Compact JSON contains no line breaks, so `data` is one line."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data, separators=(",", ":"))
        head = f"id: {self.id}\n" if self.id is not None else ""
        return f"{head}event: {self.event}\ndata: {text}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """Sends events until the events end or the client disconnects.

    `events` is closed in both cases, so that its resources are released.
    """

    media_type = MEDIA_TYPE

    def __init__(self, events: AsyncIterator[ServerEvent]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. A client that disconnects or is too slow does not raise an exception."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_await_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            # The events are closed even if no event was read, because they may already count as an open stream.
            if (close := getattr(self._events, "aclose", None)) is not None:
                await close()
        with suppress(asyncio.CancelledError, TimeoutError, OSError, ClientDisconnect):
            sending.result()

    async def _send(self, send: Send) -> None:
        async def write(data: bytes) -> None:
            async with asyncio.timeout(WRITE_WITHIN_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await write(f"retry: {RECONNECT_MS}\n\n".encode())
        following = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                # `wait` does not cancel `following` at the timeout. A cancelled `anext` would end an async generator.
                await asyncio.wait((following,), timeout=COMMENT_INTERVAL_S)
                if not following.done():
                    await write(_BEAT)
                    continue
                event = following.result()
                if event is None:
                    break
                await write(event.encode())
                following = asyncio.ensure_future(anext(self._events, None))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
