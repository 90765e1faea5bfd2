"""Server-sent events: a stream of events to one client, which may be slow."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from toolcrew.orchestrator.http.piece_responses import PieceResponse

MEDIA_TYPE = "text/event-stream"
COMMENT_INTERVAL_S = 15.0
"""Interval in seconds of keep-alive comments in a stream without events."""
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


class EventStream(PieceResponse):
    """Sends events until the events end or the client disconnects. It continues with Last-Event-ID.

    `events` is closed in both cases, so that its resources are released.
    """

    # The events that a slow client has not read are in Redis.
    least_bytes_per_s = 0

    def __init__(self, events: AsyncIterator[ServerEvent]) -> None:
        resources = AsyncExitStack()
        # The events are closed even if no event was read, because they may already count as an open stream.
        if (close := getattr(events, "aclose", None)) is not None:
            resources.push_async_callback(close)
        super().__init__(_encode(events), _HEADERS, resources, MEDIA_TYPE)


async def _encode(events: AsyncIterator[ServerEvent]) -> AsyncIterator[bytes]:
    yield f"retry: {RECONNECT_MS}\n\n".encode()
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            # `wait` does not cancel `following` at the timeout. A cancelled `anext` would end an async generator.
            await asyncio.wait((following,), timeout=COMMENT_INTERVAL_S)
            if not following.done():
                yield _BEAT
                continue
            event = following.result()
            if event is None:
                return
            yield event.encode()
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
