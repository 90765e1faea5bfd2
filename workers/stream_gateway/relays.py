"""The state of one stream between a client's connection and the channel of a sandbox, and the rules for its frames.

::

    waiting --start--> opening --OPENED--> open --END--> ended
                          `--END, REPLY--> ended

CLOSE of the client ends a stream in every state. A request (CALL) stays in `opening` until its REPLY. Both sides are
checked: DATA begins at the next position and stays below the credit, and a credit stays within a window.
"""

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from toolcrew.contract.errors import OperatorError, ToolFailure
from toolcrew.contract.stream_protocol import (
    BULK_WINDOW_BYTES,
    BY_GATEWAY,
    LAST,
    FrameKind,
    StreamFrame,
    StreamFrameError,
)

_MAX_MEMORY = 16 * BULK_WINDOW_BYTES
"""Bytes of memory that the frames of one direction of a stream may need. Only many tiny frames reach this limit."""

_MAX_MESSAGE_CHARS = 2000


class StreamViolation(StreamFrameError):
    """Raised when a frame breaks the protocol. The connection of its sender ends."""


class StreamSide(Protocol):
    """The connection of one side of a relay."""

    def send(self, frame: StreamFrame) -> None:
        """Send a frame when its turn comes."""
        ...

    def memory_of(self, stream: int) -> int:
        """Return the memory of the data that waits for one stream of this side."""
        ...

    def remove(self, relay: "StreamRelay") -> None:
        """Forget a stream that has ended."""
        ...


@dataclass
class Direction:
    """Bytes of one direction. `position`: of the next byte. `credit`: the position up to which the receiver lets the
    sender send.
    """

    position: int = 0
    credit: int = 0
    is_over: bool = False

    def take(self, frame: StreamFrame) -> None:
        """Check and count a frame with DATA. Raises StreamViolation."""
        end = self.position + len(frame.payload)
        if self.is_over or frame.offset != self.position or end > self.credit:
            raise StreamViolation(f"DATA from {frame.offset} to {end}, at {self.position} with credit {self.credit}")
        if not frame.payload and not frame.flags & LAST:
            raise StreamViolation("DATA without bytes")
        self.position, self.is_over = end, bool(frame.flags & LAST)

    def grant(self, frame: StreamFrame) -> bool:
        """Check a credit. Return False when it changes nothing. Raises StreamViolation."""
        if frame.offset > self.position + BULK_WINDOW_BYTES:
            raise StreamViolation(f"a credit up to {frame.offset}, at {self.position}")
        is_new = frame.offset > self.credit
        self.credit = max(self.credit, frame.offset)
        return is_new


class RelayState(Enum):
    """State of a relay."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    ENDED = "ended"


@dataclass
class StreamRelay:
    """A stream or a request. `number`: in the channel of the sandbox. `client_number`: in the connection of the client.
    `first`: the frame that opens it, with the number of the channel. `up`: bytes from the sandbox.
    """

    client: StreamSide
    sandbox: StreamSide
    client_number: int
    number: int
    first: StreamFrame
    state: RelayState = RelayState.WAITING
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)

    @property
    def is_request(self) -> bool:
        return self.first.kind is FrameKind.CALL

    def start(self) -> None:
        """Open the stream in the sandbox, with the credit that the client has sent meanwhile."""
        self.state = RelayState.OPENING
        self.sandbox.send(self.first)
        if self.up.credit:
            self.sandbox.send(StreamFrame(FrameKind.CREDIT, self.number, self.up.credit))

    def pass_up(self, frame: StreamFrame) -> None:
        """Check a frame of the sandbox and send it to the client. Raises StreamViolation."""
        expected = FrameKind.REPLY if self.is_request else FrameKind.END
        if frame.kind is expected and self.state is not RelayState.WAITING:
            self.client.send(StreamFrame(frame.kind, self.client_number, payload=frame.payload))
            self._end()
            return
        if frame.kind is FrameKind.OPENED and self.state is RelayState.OPENING and not self.is_request:
            self.state = RelayState.OPEN
        elif frame.kind is FrameKind.DATA and self.state is RelayState.OPEN:
            self.up.take(frame)
        elif frame.kind is FrameKind.CREDIT and self.state is RelayState.OPEN:
            if not self.down.grant(frame):
                return
        else:
            raise StreamViolation(f"{frame.kind.name} in the state {self.state.value}")
        self._send(self.client, self.client_number, frame)

    def pass_down(self, frame: StreamFrame) -> None:
        """Check a frame of the client and send it to the sandbox. Raises StreamViolation."""
        if frame.kind is FrameKind.CLOSE:
            if self.state is not RelayState.WAITING:
                self.sandbox.send(StreamFrame(FrameKind.CLOSE, self.number))
            self._end()
        elif frame.kind is FrameKind.CREDIT and not self.is_request:
            if self.up.grant(frame) and self.state is not RelayState.WAITING:
                self._send(self.sandbox, self.number, frame)
        elif frame.kind is FrameKind.DATA and self.state is RelayState.OPEN:
            self.down.take(frame)
            self._send(self.sandbox, self.number, frame)
        else:
            raise StreamViolation(f"{frame.kind.name} in the state {self.state.value}")

    def fail(self, error: ToolFailure | OperatorError) -> None:
        """End the stream with an error, unless it has ended."""
        if self.state is not RelayState.ENDED:
            self.client.send(build_failure(self.first.kind, self.client_number, error))
            self._end()

    def leave(self, error: ToolFailure | OperatorError) -> None:
        """End the stream in the sandbox too, and tell the client the error."""
        if self.state in (RelayState.OPENING, RelayState.OPEN):
            self.sandbox.send(StreamFrame(FrameKind.CLOSE, self.number))
        self.fail(error)

    def _end(self) -> None:
        self.state = RelayState.ENDED
        self.client.remove(self)
        self.sandbox.remove(self)

    def _send(self, side: StreamSide, number: int, frame: StreamFrame) -> None:
        side.send(StreamFrame(frame.kind, number, frame.offset, frame.payload, frame.flags))
        if frame.kind is FrameKind.DATA and side.memory_of(number) > _MAX_MEMORY:
            raise StreamViolation("too many tiny frames wait")


def build_failure(kind: FrameKind, stream: int, error: ToolFailure | OperatorError) -> StreamFrame:
    """Return the frame that ends a stream or a request with an error. `kind`: of the frame that opened it."""
    payload = json.dumps({"error": {"code": error.code.value, "message": str(error)[:_MAX_MESSAGE_CHARS]}}).encode()
    return StreamFrame(FrameKind.REPLY if kind is FrameKind.CALL else FrameKind.END, stream, BY_GATEWAY, payload)
