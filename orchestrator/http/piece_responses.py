"""Responses that are sent in pieces, to one client, which may be slow."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolcrew.concurrency.read_memory import Reservation, release_pieces
from toolcrew.orchestrator.http.body_limits import LEAST_BYTES_PER_S

T = TypeVar("T")
PIECE_BYTES = 256 * 1024
CONTENT = "application/octet-stream"
WRITE_WITHIN_S = 30.0
"""Seconds after which a client that accepts no data is disconnected."""


class ResponseCut(Exception):
    """The rest of a response cannot be sent: the client has disconnected, accepts no data or less than the lowest rate,
    or the source of the content has failed. The connection is closed, so that the client notices a missing part.
    """


class PieceResponse(Response):
    """Sends pieces until they end or fail, or until the client disconnects or is too slow.

    `least_bytes_per_s`: the lowest average rate of the client after its first WRITE_WITHIN_S seconds. Only the time
    that a piece waits for the client counts, not the time until there is a piece.
    """

    least_bytes_per_s = LEAST_BYTES_PER_S

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        headers: Mapping[str, str],
        resources: AsyncExitStack,
        media_type: str | None = None,
        status: int = 200,
    ) -> None:
        """`resources`: closed at the end in every case, even if no piece was read. `pieces` may raise ResponseCut."""
        super().__init__(headers=headers, media_type=media_type, status_code=status)
        # The response of the base class has no body, and its length is not the length of the pieces.
        if "content-length" not in {name.lower() for name in headers}:
            del self.headers["content-length"]
        self._pieces = pieces
        self._resources = resources
        self._waited_s = self._sent_bytes = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces. A client that disconnects or is too slow does not raise an exception."""
        async with self._resources:
            sending = asyncio.ensure_future(self._send(send))
            leaving = asyncio.ensure_future(_await_disconnect(receive))
            try:
                await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)
                if (close := getattr(self._pieces, "aclose", None)) is not None:
                    await close()
            with suppress(asyncio.CancelledError, ResponseCut):
                sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await self._write(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, piece: bytes) -> None:
        loop, credit_s = asyncio.get_running_loop(), WRITE_WITHIN_S
        if self.least_bytes_per_s:
            credit_s = min(credit_s, WRITE_WITHIN_S + self._sent_bytes / self.least_bytes_per_s - self._waited_s)
        began_at = loop.time()
        try:
            async with asyncio.timeout(credit_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (TimeoutError, OSError, ClientDisconnect):
            raise ResponseCut from None
        self._waited_s += loop.time() - began_at
        self._sent_bytes += len(piece)


class FileAnswer(PieceResponse):
    """Response with content that is in memory. Each piece leaves the memory when the client has received it.

    `pieces`: no other variable refers to them. `memory`: the memory that is reserved for them.
    """

    def __init__(
        self, pieces: deque[bytes], memory: Reservation, headers: Mapping[str, str], resources: AsyncExitStack
    ) -> None:
        length = str(sum(map(len, pieces)))
        sent = _iterate(release_pieces(pieces, memory))
        super().__init__(sent, {"Content-Type": CONTENT, **headers, "Content-Length": length}, resources)


def split_pieces(data: bytes) -> deque[bytes]:
    """Return the data in pieces of PIECE_BYTES."""
    return deque(data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


async def _iterate(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel the work when the client disconnects. The body of the request must be read
    before. Raises ClientDisconnect.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_await_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
