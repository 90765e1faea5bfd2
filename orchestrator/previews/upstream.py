"""A connection to a port of a sandbox: writes requests and parses responses."""

from collections.abc import AsyncIterator, Callable

import h11

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.orchestrator.previews.messages import RefusedMessage
from toolcrew.orchestrator.streams import Stream

MAX_HEAD_BYTES = 64 * 1024


class Upstream:
    """One connection. It serves requests one after another as long as both sides keep it open. `release`: called once
    when it is closed.
    """

    def __init__(self, stream: Stream, release: Callable[[], None]) -> None:
        self._stream = stream
        self._release = release
        self._http = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
        self.is_fresh = True
        self._has_ended = False

    @property
    def is_reusable(self) -> bool:
        """Return whether another request may follow on this connection."""
        return self._http.our_state is h11.IDLE and not self._has_ended and not self._stream.has_ended

    async def send(self, event: h11.Event) -> None:
        """Write a part of a request as soon as the sandbox takes it. Raises ToolFailure, OperatorError."""
        if data := self._http.send(event):
            await self._stream.write(data)

    async def receive(self) -> h11.Event:
        """Return the next part of the response. Raises RefusedMessage for an invalid one; ToolFailure,
        OperatorError.
        """
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise RefusedMessage(502, f"the program in the sandbox sent an invalid response: {error}") from error
            if isinstance(event, h11.Event):
                return event
            data = await self._read()
            if not data and self._http.their_state is h11.SEND_RESPONSE and not self._http.trailing_data[0]:
                raise SandboxUnavailable("the program in the sandbox closed the connection without a response")
            self._http.receive_data(data)

    def end_request(self) -> None:
        """Make the connection ready for another request, if both sides keep it open."""
        is_done = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if is_done and self._http.trailing_data == (b"", False):
            self._http.start_next_cycle()
            self.is_fresh = False

    async def read_raw(self) -> AsyncIterator[bytes]:
        """Yield the bytes after the switch to WebSocket. Raises ToolFailure, OperatorError."""
        data = self._http.trailing_data[0]
        while data or (data := await self._read()):
            yield data
            data = b""

    async def write_raw(self, data: bytes) -> None:
        """Write bytes after the switch to WebSocket; none: no bytes follow. Raises ToolFailure, OperatorError."""
        await self._stream.write(data, is_last=not data)

    async def _read(self) -> bytes:
        """Return the next bytes of the sandbox; none at the end."""
        while not self._has_ended:
            piece = await self._stream.read()
            # The stream itself ends only when the front has also ended its direction.
            self._has_ended = piece is None or piece.is_last
            if piece is not None and piece.data:
                return piece.data
        return b""

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
        self._release()
