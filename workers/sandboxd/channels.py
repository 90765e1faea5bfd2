"""The two kinds of connection of sandboxd as frames: to one worker, and to the guest of one sandbox."""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping

from workers.sandboxd.frames import MAX_DOWN, MAX_UP, Frame, FrameDecoder, FrameError, encode_frame

_WAITING_BYTES = 2 * 1024 * 1024
"""Reading stops while this much has come that nobody has taken."""
_UNSENT_BYTES = 1024 * 1024
_FRAME_BYTES = 1024
"""What a frame counts beside its body, headers being small."""
_MUX_HEADER = struct.Struct(">BxxxI")
_STDOUT = 1
_DEBUG_BYTES = 4096


class WorkerLink(asyncio.Protocol):
    """A connection as the event loop knows it: no task of its own. `on_open` gets the link when it is there.

    While it is watched, `on_gone` is called when the worker has left, `on_pace` with True when it takes less than it is
    sent and with False when it has caught up.
    """

    def __init__(self, on_open: Callable[["WorkerLink"], None]) -> None:
        self._on_open = on_open
        self._on_gone: Callable[[], None] | None = None
        self._on_pace: Callable[[bool], None] | None = None
        self._decoder = FrameDecoder(MAX_DOWN)
        self._frames: deque[Frame] = deque()
        self._waiting_bytes = 0
        self._broken: FrameError | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._sendable = asyncio.Event()
        self._sendable.set()
        self.transport: asyncio.Transport | None = None
        self.is_gone = False

    def watch(self, on_gone: Callable[[], None], on_pace: Callable[[bool], None]) -> None:
        """Tell of the worker's end and pace from now on; of what is so already, at once."""
        self._on_gone, self._on_pace = on_gone, on_pace
        if self.is_gone:
            on_gone()
        elif not self._sendable.is_set():
            on_pace(True)

    def unwatch(self) -> None:
        self._on_gone = self._on_pace = None

    async def next(self) -> Frame | None:
        """The next frame; None when the worker has left. Raises FrameError when it sent what is none."""
        while not self._frames:
            if self._broken is not None:
                raise self._broken
            if self.is_gone:
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        frame = self._frames.popleft()
        self._count(-len(frame.body) - _FRAME_BYTES)
        return frame

    def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        """Send a frame; to a worker that has left it goes nowhere. Raises FrameError when it is too large."""
        data = encode_frame(header, body, max_total=MAX_DOWN)
        if self.transport is not None and not self.is_gone:
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the worker has taken most of what was sent, or has left."""
        await self._sendable.wait()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._broken = error
            self._go()
            return
        self._frames += frames
        self._count(sum(len(frame.body) + _FRAME_BYTES for frame in frames))
        self._wake()

    def eof_received(self) -> bool:
        self._go()
        return True  # whoever serves the connection closes it

    def connection_lost(self, exc: Exception | None) -> None:
        self._go()

    def pause_writing(self) -> None:
        if self.is_gone:
            return
        self._sendable.clear()
        if self._on_pace is not None:
            self._on_pace(True)

    def resume_writing(self) -> None:
        self._sendable.set()
        if self._on_pace is not None and not self.is_gone:
            self._on_pace(False)

    def _go(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self._sendable.set()
        self._wake()
        if self._on_gone is not None:
            self._on_gone()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _count(self, change: int) -> None:
        assert self.transport is not None
        before, self._waiting_bytes = self._waiting_bytes, self._waiting_bytes + change
        if before <= _WAITING_BYTES < self._waiting_bytes:
            self.transport.pause_reading()
        elif self._waiting_bytes <= _WAITING_BYTES < before and not self.is_gone:
            self.transport.resume_reading()


class GuestChannel(asyncio.Protocol):
    """Frames to and from one guest. What the guest writes is hostile: the first broken frame closes the channel.

    `on_frame` gets every frame, `on_lost` a reason, once. stderr of PID 1 is debug text: its last 4 KiB are kept, never
    parsed.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = FrameDecoder(MAX_UP)
        self._mux = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = False
        self.debug_text = b""

    @classmethod
    async def open(
        cls, sock: socket.socket, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]
    ) -> "GuestChannel":
        """A channel over an attached socket, which it then owns."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(on_frame, on_lost), sock=sock)
        return channel

    def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        """Send one frame; a lost channel takes it silently, its `on_lost` has told already."""
        if self._transport is not None and not self._lost:
            self._transport.write(encode_frame(header, body, max_total=MAX_DOWN))

    async def drain(self) -> None:
        """Wait until the guest has taken most of what was sent."""
        await self._writable.wait()

    def pause(self) -> None:
        """Stop reading: whoever takes the events is slow."""
        if self._transport is not None and not self._lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._lost:
            self._transport.resume_reading()

    def close(self, reason: str = "closed by sandboxd") -> None:
        """Close the connection; the guest then sees the end of its stdin and exits."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._demultiplex(data):
                for frame in self._decoder.feed(payload):
                    if self._lost:
                        return
                    self._on_frame(frame)
        except FrameError as error:
            self.close(f"the guest broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection to the container ended{f' ({exc})' if exc else ''}")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _lose(self, reason: str) -> None:
        self._writable.set()
        if not self._lost:
            self._lost = True
            self._on_lost(reason)

    def _demultiplex(self, data: bytes) -> list[bytes]:
        self._mux += data
        payloads: list[bytes] = []
        at = 0
        while len(self._mux) - at >= _MUX_HEADER.size:
            stream, size = _MUX_HEADER.unpack_from(self._mux, at)
            end = at + _MUX_HEADER.size + size
            if len(self._mux) < end:
                break
            payload = bytes(self._mux[at + _MUX_HEADER.size : end])
            if stream == _STDOUT:
                payloads.append(payload)
            else:
                self.debug_text = (self.debug_text + payload)[-_DEBUG_BYTES:]
            at = end
        del self._mux[:at]
        return payloads
