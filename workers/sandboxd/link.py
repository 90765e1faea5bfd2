"""One worker's connection as frames: those that have come, in order; those to be sent; and word of its end and of its pace."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from workers.sandboxd.frames import MAX_DOWN, Frame, FrameDecoder, FrameError, encode_frame

_WAITING_BYTES = 2 * 1024 * 1024
"""Reading stops while this much has come that nobody has taken."""
_UNSENT_BYTES = 1024 * 1024
_FRAME_BYTES = 1024
"""What a frame counts beside its body, headers being small."""


class WorkerLink(asyncio.Protocol):
    """A connection as the event loop knows it: no task of its own. `on_open` gets the link when it is there.

    While it is watched, `on_gone` is called when the worker has left, `on_pace` with True when it takes less than it is sent and with
    False when it has caught up.
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
