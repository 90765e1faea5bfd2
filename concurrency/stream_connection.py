"""One end of a connection with stream frames (contract/stream_protocol.py), as an asyncio protocol.

It sends no faster than the other side reads, so that frames wait in the outbox, where a later key can pass an earlier
piece of a file.
"""

import asyncio
from collections.abc import Callable, Sequence

from toolcrew.concurrency.stream_outbox import StreamOutbox
from toolcrew.contract.stream_protocol import StreamDecoder, StreamFrame, StreamFrameError

WRITE_BYTES = 65_536
"""Bytes that are given to the transport at once."""
READ_BYTES = 65_536
"""Bytes that are read at once. The limit keeps a sandbox with tiny frames from delaying other connections."""
_HIGH_BYTES, _LOW_BYTES = 131_072, 32_768


class StreamConnection(asyncio.BufferedProtocol):
    """A connection. `on_open` is called when it is connected, `on_lost` when it has ended. Before `begin_frames`, bytes
    go to `on_bytes`. Afterwards `on_frames` receives the frames. Both may raise StreamFrameError, which ends the
    connection.
    """

    def __init__(self, outbox: StreamOutbox) -> None:
        self.outbox = outbox
        self.transport: asyncio.Transport | None = None
        self.on_open: Callable[[], None] = _ignore
        self.on_bytes: Callable[[bytes], None] = _ignore_bytes
        self.on_frames: Callable[[Sequence[StreamFrame]], None] | None = None
        self.on_lost: Callable[[str], None] = _ignore_reason
        self.on_sent: Callable[[int], None] = _ignore_size
        self._decoder = StreamDecoder(has_epochs=outbox.has_epochs)
        self._holds: set[str] = set()
        self._is_writable = True
        self._is_flushing = False
        self._reason = ""
        self._is_lost = False
        # A memoryview: the TLS transport fills a part of the buffer through a slice.
        self._buffer = memoryview(bytearray(READ_BYTES))

    @property
    def is_idle(self) -> bool:
        """Return whether no frame waits."""
        return self.outbox.is_empty

    @property
    def memory(self) -> int:
        """Bytes that wait to be sent, in the outbox and in the transport."""
        return self.outbox.memory + (self.transport.get_write_buffer_size() if self.transport is not None else 0)

    def begin_frames(self, on_frames: Callable[[Sequence[StreamFrame]], None], rest: bytes = b"") -> None:
        """Read frames from now on. `rest`: bytes of frames that were already received."""
        self._decoder = StreamDecoder(has_epochs=self.outbox.has_epochs)
        self.on_frames = on_frames
        if rest:
            self.receive(rest)

    def end_frames(self) -> None:
        """Pass bytes to `on_bytes` again."""
        self.on_frames = None

    def send(self, frame: StreamFrame) -> None:
        """Send a frame when its turn comes."""
        self.outbox.put(frame)
        self.flush_soon()

    def write(self, data: bytes) -> None:
        """Send bytes before all frames that wait."""
        if self.transport is not None and not self._is_lost:
            self.transport.write(data)

    def hold(self, reason: str) -> None:
        """Send no frames until `release` with the same reason."""
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        self._holds.discard(reason)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Send what waits at the end of this iteration of the event loop, so that small frames share a packet."""
        if not self._is_flushing and not self._holds and self._is_writable and not self._is_lost:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def end(self, reason: str) -> None:
        """End the connection at once. What waits is dropped."""
        self._reason = self._reason or reason
        if self.transport is not None:
            self.transport.abort()
        self._lose()

    def close(self, reason: str) -> None:
        """End the connection after everything that waits was given to the transport and sent."""
        self._reason = self._reason or reason
        if self.transport is not None and not self._is_lost:
            self.transport.write(self.outbox.take(self.outbox.memory + WRITE_BYTES))
            self.transport.close()

    # --- Methods that the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(_HIGH_BYTES, _LOW_BYTES)
        self.on_open()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(bytes(self._buffer[:nbytes]))

    def receive(self, data: bytes) -> None:
        """Process received bytes."""
        if self._is_lost:
            return
        try:
            if self.on_frames is None:
                self.on_bytes(data)
            else:
                self.on_frames(self._decoder.feed(data))
        except StreamFrameError as error:
            self.end(str(error))

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reason = self._reason or str(exc or "the other side has closed the connection")
        self._lose()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.outbox.clear()
            self.on_lost(self._reason)

    def _flush(self) -> None:
        self._is_flushing = False
        while not self._holds and self._is_writable and not self._is_lost and self.transport is not None:
            data = self.outbox.take(WRITE_BYTES)
            if not data:
                return
            self.transport.write(data)
            self.on_sent(len(data))


def _ignore() -> None:
    pass


def _ignore_bytes(_: bytes) -> None:
    pass


def _ignore_reason(_: str) -> None:
    pass


def _ignore_size(_: int) -> None:
    pass
