"""The channel of one sandbox: all streams of its session, from every client, over one socket to its stream server.

The bytes of a channel come from a sandbox and are untrusted. The first violation ends this channel and no other one.
The next stream of the session then opens the channel again, and EPOCH makes both sides forget the earlier streams.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from toolcrew.concurrency.stream_connection import StreamConnection
from toolcrew.concurrency.stream_outbox import MemoryCount, StreamOutbox
from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import ErrorCode, OperatorError, SandboxUnavailable, ToolFailure
from toolcrew.contract.stream_protocol import EPOCH_BYTES, HEADER, FrameKind, StreamFrame
from toolcrew.workers.stream_gateway.limits import StreamUsage
from toolcrew.workers.stream_gateway.relays import RelayState, StreamRelay, StreamViolation

log = structlog.get_logger(__name__)

EPOCH_S = 10.0
"""Seconds that the stream server has to answer EPOCH. It finishes the frame that it is sending first."""
USE_S = 1.0
"""Seconds between two reports to sandboxd while bytes flow, and of silence after which sandboxd is asked first."""
IDLE_S = 60.0
"""Seconds without a stream after which the channel is given back to sandboxd."""
BUSY_S = 5.0
"""Seconds that sandboxd has to notice the end of an earlier gateway."""
CHECK_S = 10.0
"""Seconds between two questions to a stream server that owes an answer whether it lives."""
MAX_UNANSWERED = 3
_BUSY_POLL_S = 0.1
_SILENT = (
    "the stream server of the sandbox does not answer: end the processes that use its processor or have stopped it, or "
    "open another session"
)
_LOST = "the sandbox of this stream was lost: attach again, and the session gets another sandbox"


class BorrowedChannel(Protocol):
    """The channel of a sandbox as sandboxd hands it out (workers/stream_channels.py)."""

    @property
    def sock(self) -> socket.socket:
        """The socket to the stream server. The caller closes it."""
        ...

    async def use(self, *, bytes_in: int, bytes_out: int, open_streams: int) -> None:
        """Report the use of the channel, and wait until the sandbox runs. Raises ToolFailure, OperatorError."""
        ...

    def close(self) -> None:
        """Give the channel back."""
        ...


OpenChannel = Callable[[str, int], Awaitable[BorrowedChannel]]
"""Borrows the channel of a session (`tenant:session`) with the number of its opening. Raises ToolFailure,
OperatorError.
"""


class SessionChannel:
    """The channel of a session. It opens when the first stream is added. `on_end` is called when it has ended."""

    def __init__(
        self,
        open_channel: OpenChannel,
        session: str,
        fence: int,
        usage: StreamUsage,
        memory: MemoryCount,
        on_end: Callable[["SessionChannel"], None],
    ) -> None:
        self.session = session
        self.fence = fence
        self.connection = StreamConnection(StreamOutbox(memory))
        self._open_channel = open_channel
        self._on_end = on_end
        self._limits = usage.limits
        self._relays: dict[int, StreamRelay] = {}
        self._last_number = 0
        self._borrowed: BorrowedChannel | None = None
        self._is_ready = self._has_ended = False
        self._traffic = asyncio.Event()
        self._no_streams = asyncio.Event()
        self._alive: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._bytes_in = self._bytes_out = 0
        self._idle: asyncio.TimerHandle | None = None
        self._pauses: set[asyncio.TimerHandle] = set()
        self._scan = bytearray()
        self._epoch = b""
        self._epochs = 0
        self._epoch_done: asyncio.Future[None] | None = None
        self._tenant_rates = usage.tenant_rates(session.partition(":")[0])
        own_bytes = usage.bytes_bucket(usage.limits.session_bytes_per_s)
        self._frame_buckets = (usage.frames_bucket(usage.limits.frames_per_s), self._tenant_rates.frames)
        self._byte_buckets = (own_bytes, self._tenant_rates.bytes, usage.host_bytes)
        self._task = asyncio.create_task(self._run())

    @property
    def memory(self) -> int:
        """Bytes of memory of what waits for the sandbox."""
        return self.connection.memory

    # --- Streams

    def add(self, relay: StreamRelay) -> None:
        """Open a stream when the channel is ready."""
        self._relays[relay.number] = relay
        self._stop_idle_timer()
        if self._is_ready:
            relay.start()

    def next_number(self) -> int:
        """Return the number of a new stream."""
        self._last_number += 1
        return self._last_number

    def send(self, frame: StreamFrame) -> None:
        """Send a frame when its turn comes."""
        self.connection.send(frame)
        if self.memory > self._limits.channel_memory:
            self._end_by(StreamViolation("the sandbox does not read"))
        self._traffic.set()

    def memory_of(self, stream: int) -> int:
        """Return the memory of the data that waits for one stream."""
        return self.connection.outbox.memory_of(stream)

    def remove(self, relay: StreamRelay) -> None:
        """Forget a stream that has ended."""
        if self._relays.pop(relay.number, None) is not None and not self._relays:
            self._start_idle_timer()
            # Report at once that no stream is open: a fork of the session waits for it.
            self._no_streams.set()
            self._traffic.set()

    def end(self, error: ToolFailure | OperatorError) -> None:
        """End the channel and all of its streams."""
        if self._has_ended:
            return
        self._has_ended = True
        self.connection.end(str(error))
        if self._borrowed is not None:
            self._borrowed.close()
        self._stop_idle_timer()
        if self._alive is not None:
            self._alive.cancel()
        for timer in self._pauses:
            timer.cancel()
        if self._task is not asyncio.current_task():
            self._task.cancel()
        self._fail_all(error)
        self._on_end(self)

    async def wait_closed(self) -> None:
        """Wait until the task of an ended channel has ended."""
        await cancel_all([self._task])

    # --- Opening

    async def _run(self) -> None:
        try:
            await self._open()
            await self._report_uses()
        except (ToolFailure, OperatorError) as error:
            self.end(error)
        except OSError as error:
            self.end(SandboxUnavailable(f"the stream channel of the session does not work ({error}): try again"))

    async def _open(self) -> None:
        self._borrowed = await self._borrow()
        connection = self.connection
        connection.on_lost = lambda _: self.end(SandboxUnavailable(_LOST))
        connection.on_bytes = self._scan_bytes
        connection.on_sent = self._count_sent
        connection.hold("epoch")
        connection.hold("asleep")
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=self._borrowed.sock)
        await self._begin_epoch()
        self._is_ready = True
        self._alive = asyncio.get_running_loop().call_later(CHECK_S, self._check_alive)
        for relay in list(self._relays.values()):
            if relay.state is RelayState.WAITING:
                relay.start()

    async def _borrow(self) -> BorrowedChannel:
        """Borrow the channel. Sandboxd may not have noticed yet that an earlier gateway of the host has ended."""
        loop = asyncio.get_running_loop()
        until = loop.time() + BUSY_S
        while True:
            try:
                return await self._open_channel(self.session, self.fence)
            except ToolFailure as failure:
                if failure.code is not ErrorCode.SESSION_BUSY or loop.time() > until:
                    raise
            await asyncio.sleep(_BUSY_POLL_S)

    async def _begin_epoch(self) -> None:
        """Let the stream server forget all streams, and drop everything that it has sent before its answer."""
        self._epochs += 1
        payload = self._epochs.to_bytes(4, "big") + os.urandom(EPOCH_BYTES - 4)
        self._epoch = StreamFrame(FrameKind.EPOCH, payload=payload).encode()
        self._scan.clear()
        self._epoch_done = asyncio.get_running_loop().create_future()
        self.connection.end_frames()
        await self._use()
        self.connection.write(self._epoch)
        try:
            async with asyncio.timeout(EPOCH_S):
                await self._epoch_done
        except TimeoutError:
            raise SandboxUnavailable(_SILENT) from None

    def _scan_bytes(self, data: bytes) -> None:
        """Find the answer to EPOCH. An earlier gateway may have read half a frame, so no byte before it is a frame."""
        self._count_received(len(data))
        self._scan += data
        at = self._scan.find(self._epoch)
        if at < 0:
            del self._scan[: -len(self._epoch) + 1]
            return
        rest = bytes(self._scan[at + len(self._epoch) :])
        self._scan.clear()
        if self._epoch_done is not None and not self._epoch_done.done():
            self._epoch_done.set_result(None)
        self.connection.release("epoch")
        self.connection.begin_frames(self._take_frames, rest)

    # --- Frames of the sandbox

    def _take_frames(self, frames: Sequence[StreamFrame]) -> None:
        self._count_received(sum(HEADER.size + len(frame.payload) for frame in frames))
        self._count_frames(len(frames))
        try:
            for frame in frames:
                self._take(frame)
        except StreamViolation as violation:
            self._end_by(violation)

    def _take(self, frame: StreamFrame) -> None:
        if frame.kind is FrameKind.PING:
            self.send(StreamFrame(FrameKind.PONG, payload=frame.payload))
        elif frame.kind is FrameKind.PONG:
            self._unanswered = 0
        elif frame.kind is FrameKind.EPOCH:
            self.end(SandboxUnavailable(_LOST))
        elif not 0 < frame.stream <= self._last_number:
            raise StreamViolation(f"{frame.kind.name} for stream {frame.stream}, which was never opened")
        elif (relay := self._relays.get(frame.stream)) is not None:
            relay.pass_up(frame)
            if relay.state is RelayState.ENDED:
                self.connection.outbox.forget(relay.number)
        # Otherwise the client has left the stream, and the sandbox did not know so yet.

    def _check_alive(self) -> None:
        """End the channel of a stream server that owes an answer and does not say that it lives. A program of the
        sandbox may have stopped it.
        """
        if all(relay.state is not RelayState.OPENING for relay in self._relays.values()):
            self._unanswered = 0
        elif self._unanswered >= MAX_UNANSWERED:
            self.end(SandboxUnavailable(_SILENT))
            return
        else:
            self._unanswered += 1
            self.send(StreamFrame(FrameKind.PING))
        self._alive = asyncio.get_running_loop().call_later(CHECK_S, self._check_alive)

    def _end_by(self, violation: StreamViolation) -> None:
        if not self._has_ended:
            log.warning("stream_channel_ended", session=self.session, reason=str(violation))
        self.end(
            SandboxUnavailable(
                f"the stream server of the sandbox broke the protocol ({violation}), so its streams were ended: attach "
                "again"
            )
        )

    def _fail_all(self, error: ToolFailure | OperatorError) -> None:
        for relay in list(self._relays.values()):
            relay.fail(error)

    # --- Use and rates

    async def _report_uses(self) -> None:
        """Report to sandboxd while bytes flow. After a second of silence, the sandbox may be frozen: the next frame
        waits until sandboxd has answered.
        """
        while True:
            await self._traffic.wait()
            self._traffic.clear()
            await self._use()
            self.connection.release("asleep")
            with suppress(TimeoutError):
                async with asyncio.timeout(USE_S):
                    await self._no_streams.wait()
            self._no_streams.clear()
            if not self.connection.is_idle:
                self._traffic.set()
            if not self._traffic.is_set():
                self.connection.hold("asleep")

    async def _use(self) -> None:
        assert self._borrowed is not None
        bytes_in, bytes_out = self._bytes_in, self._bytes_out
        self._bytes_in = self._bytes_out = 0
        await self._borrowed.use(bytes_in=bytes_in, bytes_out=bytes_out, open_streams=len(self._relays))

    def _count_received(self, size: int) -> None:
        self._bytes_out += size
        self._count(size)

    def _count_sent(self, size: int) -> None:
        self._bytes_in += size
        self._count(size)
        self._count_frames(self.connection.outbox.count_sent())

    def _count(self, size: int) -> None:
        self._traffic.set()
        self._pause(max(bucket.take(size) for bucket in self._byte_buckets))

    def _count_frames(self, count: int) -> None:
        self._pause(max(bucket.take(count) for bucket in self._frame_buckets))

    def _pause(self, pause_s: float) -> None:
        """Neither read nor send for a while, because a rate was exceeded."""
        transport = self.connection.transport
        if pause_s <= 0 or transport is None or transport.is_closing():
            return
        transport.pause_reading()
        self.connection.hold("rate")
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def resume() -> None:
            assert timer is not None
            self._pauses.discard(timer)
            if not self._pauses and not transport.is_closing():
                transport.resume_reading()
                self.connection.release("rate")

        timer = loop.call_later(pause_s, resume)
        self._pauses.add(timer)

    # --- End

    def _start_idle_timer(self) -> None:
        if not self._has_ended:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

    def _stop_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        self.end(SandboxUnavailable("the session has no streams"))
