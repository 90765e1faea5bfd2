"""The interface between the stream server and the code that serves one kind of stream or request.

The server calls everything from one thread. No function waits: a function that cannot go on returns and continues at
the next event.
"""

from __future__ import annotations

from guest.failures import INTERNAL, INVALID_ARGUMENTS, RequestFailure
from guest.streams.frames import CREDIT, DATA, END, LAST, MAX_DATA_BYTES, OPENED, REPLY, StreamFrame, encode_fields
from guest.streams.outbox import SendRate, StreamOutbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    class Poller(Protocol):
        """Collects the descriptors that a source waits for."""

        def register(self, fd: int, events: int) -> None:
            """Wait for these events of `select.poll` at the descriptor."""

    Opener = Callable[["StreamContext", dict[str, Any]], "StreamHandler"]
    CallFunction = Callable[[dict[str, Any], "CallReply"], None]

_MAX_POSITION = 1 << 63


class StreamViolation(Exception):
    """Error: the client's side has sent a frame that the protocol does not allow."""


class EventSource:
    """Something that the server's loop serves. `wake_at`: monotonic time of its next duty, or None."""

    wake_at: float | None = None

    def register(self, poller: Poller) -> None:
        """Register descriptors for the next round."""

    def serve(self, fd: int, events: int) -> None:
        """Serve an event of a registered descriptor. The descriptor may have been closed in the same round."""

    def wake(self) -> None:
        """Do what was due at `wake_at`, and set the next time."""

    def leave(self) -> None:
        """Release everything. Nothing is called later."""


class StreamHandler(EventSource):
    """Serves one open stream. An exception RequestFailure or OSError of any function ends the stream with its error;
    `leave` is called then. The server sets `number`.
    """

    number = 0

    def take(self, data: bytes, is_last: bool) -> None:
        """Take bytes of the client. Their position and credit are already checked."""
        raise RequestFailure(INVALID_ARGUMENTS, "this stream takes no data")

    def resume(self) -> None:
        """Continue to send: there is room again."""


class StreamService(EventSource):
    """Serves kinds of streams and requests. `openers`: by `what` of OPEN. `calls`: by `op` of CALL.

    An opener or a call that raises RequestFailure or OSError answers with its error. A call may reply later. An opener
    calls `context.opened` at once, or its handler does so later.
    """

    def __init__(self) -> None:
        self.openers: dict[str, Opener] = {}
        self.calls: dict[str, CallFunction] = {}


class StreamContext:
    """What the handler of a stream may do with it. After `end` and `fail`, and when the client has left, all functions
    do nothing.
    """

    def __init__(self, number: int, outbox: StreamOutbox, on_end: Callable[[int], None]) -> None:
        self.number = number
        self.rate = SendRate()
        self._outbox = outbox
        self._on_end = on_end
        self._sent = 0
        self._sent_limit = 0
        self._piece: StreamFrame | None = None
        self._end: bytes | None = None
        self._is_closed = False
        self._received = 0
        self._received_limit = 0
        self._announced_limit = 0
        self._announce_step = 0
        self._has_received_last = False

    @property
    def room(self) -> int:
        """Return how many bytes `send` accepts now. `resume` is called when it rises above 0."""
        if self._piece is not None or self._end is not None or self._is_closed:
            return 0
        return min(self._sent_limit - self._sent, MAX_DATA_BYTES)

    def opened(self, fields: Mapping[str, object]) -> None:
        """Send OPENED. Call it once, before everything else."""
        self._put(encode_fields(OPENED, self.number, fields))

    def send(self, data: bytes, flags: int = 0) -> None:
        """Send at most `room` bytes. `flags`: STDERR, LAST."""
        if self._is_closed or not (data or flags & LAST):
            return
        if len(data) > self.room or self._piece is not None:
            raise ValueError(f"{len(data)} bytes exceed the room of the stream")
        self._piece = StreamFrame(DATA, self.number, self._sent, bytes(data), flags)
        self._sent += len(data)
        self._outbox.add_ready(self)

    def grant(self, count: int) -> None:
        """Let the client send `count` more bytes. The first grant is the window. Small grants are sent together."""
        self._received_limit += count
        self._announce_step = self._announce_step or max(count // 2, 1)
        if self._received_limit - self._announced_limit >= self._announce_step:
            self._announced_limit = self._received_limit
            self._put(StreamFrame(CREDIT, self.number, self._announced_limit).encode())

    def end(self, fields: Mapping[str, object]) -> None:
        """End the stream with its result, after the piece that waits."""
        if self._is_closed or self._end is not None:
            return
        self._end = encode_fields(END, self.number, fields)
        self._on_end(self.number)
        if self._piece is None:
            self._send_end()

    def fail(self, failure: RequestFailure) -> None:
        """End the stream with an error."""
        self.end({"error": failure.as_error()})

    def take_piece(self) -> bytes:
        """Return the frame that waits. For the outbox."""
        piece, self._piece = self._piece, None
        assert piece is not None
        self.rate.add(len(piece.payload))
        if self._end is not None:
            self._send_end()
        return piece.encode()

    def accept(self, frame: StreamFrame) -> bool:
        """Check DATA of the client. Return whether these are its last bytes. Raises StreamViolation."""
        end = self._received + len(frame.payload)
        if frame.offset != self._received or end > self._announced_limit or self._has_received_last:
            raise StreamViolation("DATA at another position, beyond the credit, or after the last")
        self._received = end
        self._has_received_last = bool(frame.flags & LAST)
        return self._has_received_last

    def add_credit(self, position: int) -> bool:
        """Take a CREDIT of the client. Return whether there is room that was not there before."""
        if position >= _MAX_POSITION:
            raise StreamViolation("a credit is too large")
        had_room = self.room > 0
        self._sent_limit = max(self._sent_limit, position)
        return self.room > 0 and not had_room

    def close(self) -> None:
        """Forget the stream: the client has left."""
        self._is_closed = True

    def _send_end(self) -> None:
        # The piece that waits is sent before: take_piece queues this when the piece becomes the current frame.
        self._put(self._end or b"")
        self._is_closed = True

    def _put(self, frame: bytes) -> None:
        if not self._is_closed:
            self._outbox.put(frame)


class CallReply:
    """Answers one CALL, once. Answers after the first one, and after the client has left, do nothing."""

    def __init__(self, number: int, outbox: StreamOutbox, on_end: Callable[[int], None]) -> None:
        self._number = number
        self._outbox = outbox
        self._on_end = on_end
        self.is_closed = False

    def send(self, fields: Mapping[str, object]) -> None:
        """Send the answer."""
        if self.is_closed:
            return
        self.is_closed = True
        self._on_end(self._number)
        try:
            self._outbox.put(encode_fields(REPLY, self._number, fields))
        except ValueError as error:
            self._outbox.put(
                encode_fields(REPLY, self._number, {"error": RequestFailure(INTERNAL, str(error)).as_error()})
            )

    def fail(self, failure: RequestFailure) -> None:
        """Send an error."""
        self.send({"error": failure.as_error()})
