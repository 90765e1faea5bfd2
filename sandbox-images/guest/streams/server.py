"""The loop of the stream server, from its first byte to the end of its channel.

Invariant: a frame that the protocol does not allow ends all streams, and no process. The server then answers nothing
before the next EPOCH.
"""

from __future__ import annotations

import os
import select
import time

from guest.failures import INVALID_ARGUMENTS, RequestFailure, describe_os_error
from guest.frames import FrameError
from guest.streams.frames import (
    CALL,
    CLOSE,
    CREDIT,
    DATA,
    EPOCH,
    OPEN,
    PING,
    PONG,
    SERVER_RESTART,
    StreamDecoder,
    StreamFrame,
)
from guest.streams.handlers import CallReply, EventSource, StreamContext, StreamHandler, StreamService, StreamViolation
from guest.streams.outbox import ChannelClosed, StreamOutbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

MAX_STREAMS = 64
"""Limit of open streams, and of requests without an answer."""
_READ_BYTES = 65_536
_READS = 4
# Pieces of each stream in one round, so that a fast file and a fast client leave time for the other events.
_FLUSHES = 4
_LONGEST_WAIT_S = 3600.0


class _RoundPoller:
    """The descriptors of one round, each with its source."""

    def __init__(self) -> None:
        self.source: EventSource | None = None
        self.sources: dict[int, EventSource | None] = {}
        self._poll = select.poll()

    def register(self, fd: int, events: int) -> None:
        """Wait for these events at the descriptor, for the present source."""
        self._poll.register(fd, events)
        self.sources[fd] = self.source

    def poll(self, wait_s: float) -> list[tuple[int, int]]:
        """Return the events."""
        return self._poll.poll(int(min(max(wait_s, 0.0), _LONGEST_WAIT_S) * 1000 + 0.999))


class StreamServer:
    """The streams of one channel. `incoming` and `outgoing`: its descriptors, which may be the same."""

    def __init__(self, incoming: int, outgoing: int, services: Sequence[EventSource]) -> None:
        os.set_blocking(incoming, False)
        self._incoming = incoming
        self._outbox = StreamOutbox(outgoing)
        self._decoder = StreamDecoder()
        self._services = services
        offers = [service for service in services if isinstance(service, StreamService)]
        self._openers = {what: opener for offer in offers for what, opener in offer.openers.items()}
        self._calls = {op: call for offer in offers for op, call in offer.calls.items()}
        self._contexts: dict[int, StreamContext] = {}
        self._handlers: dict[int, StreamHandler] = {}
        self._replies: dict[int, CallReply] = {}
        self._last_number = 0
        self._is_in_epoch = False
        self._say_restart()

    def run(self) -> None:
        """Serve until the channel is closed, then release everything."""
        try:
            while True:
                self._serve_round()
        except ChannelClosed:
            self._leave_streams()
        for service in self._services:
            service.leave()

    def _serve_round(self) -> None:
        poller = _RoundPoller()
        sources = [*self._services, *self._handlers.values()]
        for source in sources:
            poller.source = source
            source.register(poller)
        poller.source = None
        self._register_channel(poller)
        for fd, events in poller.poll(self._wait_s(sources)):
            owner = poller.sources[fd]
            if owner is None:
                self._serve_channel(fd, events)
            elif self._is_live(owner):
                self._guard(owner, owner.serve, fd, events)
        now = time.monotonic()
        for source in sources:
            if source.wake_at is not None and source.wake_at <= now and self._is_live(source):
                self._guard(source, source.wake)
        self._flush()

    def _register_channel(self, poller: _RoundPoller) -> None:
        reads = 0 if self._outbox.is_full else select.POLLIN
        writes = 0 if self._outbox.is_empty else select.POLLOUT
        if self._incoming == self._outbox.fd:
            poller.register(self._incoming, reads | writes)
        else:
            poller.register(self._incoming, reads)
            poller.register(self._outbox.fd, writes)

    def _wait_s(self, sources: Sequence[EventSource]) -> float:
        times = [source.wake_at for source in sources if source.wake_at is not None]
        return min(times) - time.monotonic() if times else _LONGEST_WAIT_S

    def _serve_channel(self, fd: int, events: int) -> None:
        if events & (select.POLLERR | select.POLLNVAL) or events == select.POLLHUP:
            raise ChannelClosed
        if fd == self._incoming and events & select.POLLIN:
            self._read()

    def _flush(self) -> None:
        """Send what waits. Let the streams continue whose piece has left."""
        for _ in range(_FLUSHES):
            for context in self._outbox.flush():
                handler = self._handlers.get(context.number)
                if handler is not None and context.room > 0:
                    self._guard(handler, handler.resume)

    def _read(self) -> None:
        for frame in self._read_frames():
            if frame.kind == EPOCH:
                self._begin_epoch(frame)
            elif self._is_in_epoch:
                try:
                    self._process(frame)
                except (StreamViolation, FrameError):
                    self._end_epoch()

    def _read_frames(self) -> list[StreamFrame]:
        frames: list[StreamFrame] = []
        for turn in range(_READS):
            data = self._read_once()
            # A full read may end anywhere, also within the header of an EPOCH.
            more_follow = len(data) == _READ_BYTES and turn < _READS - 1
            frames += self._decoder.feed(data, more_follow)
            if not more_follow:
                break
        return frames

    def _read_once(self) -> bytes:
        """Return the bytes that the channel has now, or nothing. Raises ChannelClosed at its end."""
        try:
            data = os.read(self._incoming, _READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        return data

    def _begin_epoch(self, frame: StreamFrame) -> None:
        self._leave_streams()
        self._is_in_epoch = True
        self._last_number = 0
        self._outbox.put(frame.encode())

    def _end_epoch(self) -> None:
        self._leave_streams()
        self._is_in_epoch = False
        self._say_restart()

    def _say_restart(self) -> None:
        self._outbox.put(StreamFrame(EPOCH, payload=SERVER_RESTART).encode())

    def _leave_streams(self) -> None:
        """Forget all streams and requests. Processes go on."""
        self._outbox.clear()
        for number in list(self._contexts):
            self._close_stream(number)
        for reply in self._replies.values():
            reply.is_closed = True
        self._replies.clear()

    def _process(self, frame: StreamFrame) -> None:
        """Process a frame. Raises StreamViolation or FrameError when the protocol does not allow it."""
        number = frame.stream
        if frame.kind == PING:
            self._outbox.put(StreamFrame(PONG, payload=frame.payload).encode())
        elif frame.kind in (OPEN, CALL):
            if number <= self._last_number:
                raise StreamViolation("a stream number is used again")
            self._last_number = number
            fields = frame.parse()
            self._open(number, fields) if frame.kind == OPEN else self._call(number, fields)
        elif frame.kind not in (DATA, CREDIT, CLOSE) or not 0 < number <= self._last_number:
            raise StreamViolation(f"a frame of kind {frame.kind} for stream {number}")
        elif frame.kind == CLOSE:
            self._close_stream(number)
        elif number in self._handlers:
            # Otherwise the stream has ended, and the client did not know so yet.
            self._pass_on(frame, self._contexts[number], self._handlers[number])

    def _pass_on(self, frame: StreamFrame, context: StreamContext, handler: StreamHandler) -> None:
        if frame.kind == DATA:
            is_last = context.accept(frame)
            self._guard(handler, handler.take, frame.payload, is_last)
        elif context.add_credit(frame.offset):
            self._guard(handler, handler.resume)

    def _open(self, number: int, fields: dict[str, Any]) -> None:
        context = StreamContext(number, self._outbox, self._forget)
        opener = self._openers.get(str(fields.get("what")))
        try:
            if opener is None:
                raise RequestFailure(INVALID_ARGUMENTS, f"'what' must be one of {', '.join(self._openers)}")
            if len(self._contexts) >= MAX_STREAMS:
                raise RequestFailure(INVALID_ARGUMENTS, f"{MAX_STREAMS} streams are open, the limit: close one first")
            self._contexts[number] = context
            handler = opener(context, fields)
            if number in self._contexts:  # it has not ended already
                handler.number = number
                self._handlers[number] = handler
        except (RequestFailure, OSError) as error:
            context.fail(_to_failure(error))

    def _call(self, number: int, fields: dict[str, Any]) -> None:
        reply = CallReply(number, self._outbox, self._forget)
        call = self._calls.get(str(fields.get("op")))
        try:
            if call is None:
                raise RequestFailure(INVALID_ARGUMENTS, f"'op' must be one of {', '.join(self._calls)}")
            if len(self._replies) >= MAX_STREAMS:
                raise RequestFailure(INVALID_ARGUMENTS, f"{MAX_STREAMS} requests wait, the limit: try again later")
            self._replies[number] = reply
            call(fields, reply)
        except (RequestFailure, OSError) as error:
            reply.fail(_to_failure(error))

    def _forget(self, number: int) -> None:
        """Remove a stream or a request that has its end."""
        self._replies.pop(number, None)
        self._contexts.pop(number, None)
        self._handlers.pop(number, None)

    def _close_stream(self, number: int) -> None:
        """Remove a stream or a request that the client has left."""
        context, handler = self._contexts.pop(number, None), self._handlers.pop(number, None)
        reply = self._replies.pop(number, None)
        if reply is not None:
            reply.is_closed = True
        if context is not None:
            context.close()
        if handler is not None:
            handler.leave()

    def _guard(self, source: EventSource, function: Callable[..., None], *arguments: object) -> None:
        """Call a function of a source. An error of a stream ends that stream."""
        try:
            function(*arguments)
        except (RequestFailure, OSError) as error:
            if not isinstance(source, StreamHandler):
                raise
            if self._is_live(source):
                self._contexts[source.number].fail(_to_failure(error))
                source.leave()

    def _is_live(self, source: EventSource) -> bool:
        """Return whether the source still has its stream. An earlier event of the round may have ended it."""
        return not isinstance(source, StreamHandler) or self._handlers.get(source.number) is source


def _to_failure(error: RequestFailure | OSError) -> RequestFailure:
    return error if isinstance(error, RequestFailure) else describe_os_error(error, "the stream")
