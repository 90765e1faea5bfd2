"""The output of an attached process that was not read yet, and its input that the process has not got yet."""

import secrets
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError

from toolcrew.contract.errors import ApiUnavailable, ErrorCode, ToolFailure
from toolcrew.orchestrator.sdk.http.handshakes import read_event

if TYPE_CHECKING:
    from toolcrew.contract.process_views import ProcessEnd

Start = int | Literal["start", "live"]
"""Where the output begins: a position, the oldest byte that the sandbox still has, or the next byte."""
MAX_UNREAD_BYTES: Final = 256 * 1024
"""Output that is held for a reader. Then the connection is not read, and a paced process waits."""
MAX_UNWATCHED_BYTES: Final = 1024 * 1024
"""Output that is held while the program waits for the end of the process and does not read."""
MAX_UNCONFIRMED_BYTES: Final = 256 * 1024
"""Input that is held until the sandbox has it. Then `write` waits. The service confirms all but the last 64 KiB."""
MAX_INPUT_BYTES: Final = 32 * 1024
"""Largest input in one message."""
_OUTPUT: Final = struct.Struct(">BQ")
_INPUT: Final = struct.Struct(">Q")
_CLOSE_STDIN: Final = '{"close_stdin":true}'
_STREAMS: Final[Mapping[int, Literal["stdout", "stderr"]]] = {1: "stdout", 2: "stderr"}


@dataclass(frozen=True)
class OutputPiece:
    """A piece of output. `position`: of its first byte, counted over both streams. Output is missing if it is larger
    than the end of the piece before.
    """

    stream: Literal["stdout", "stderr"]
    data: bytes
    position: int


class ProcessBuffer:
    """The state of an attached process over all its connections. Every byte of output is taken once, and every byte of
    input is sent until the process has it once.
    """

    def __init__(self, start: Start) -> None:
        self.start: Start = start
        self.writer = secrets.token_hex(8)
        """The name under which the process knows this input after a lost connection."""
        self.end: ProcessEnd | None = None
        self.error: Exception | None = None
        self.is_unwatched = False
        """The program waits for the end: output never holds the process up."""
        self.lost_bytes = 0
        self._pieces: deque[OutputPiece] = deque()
        self._unread_bytes = 0
        self._lost_before = 0
        self._input = bytearray()
        self._accepted = 0
        self._sent = 0
        self._is_input_over = False
        self._is_end_sent = False

    @property
    def is_over(self) -> bool:
        """No message will follow."""
        return self.end is not None or self.error is not None

    @property
    def is_readable(self) -> bool:
        return bool(self._pieces) or self.is_over

    @property
    def has_room(self) -> bool:
        return self.is_over or self.is_unwatched or self._unread_bytes < MAX_UNREAD_BYTES

    @property
    def is_writable(self) -> bool:
        return self.is_over or len(self._input) < MAX_UNCONFIRMED_BYTES

    def take(self) -> OutputPiece | None:
        """Return the next piece; None at the end. Raises the error that ended the connection."""
        if self._pieces:
            piece = self._pieces.popleft()
            self._unread_bytes -= len(piece.data)
            return piece
        if self.error is not None:
            raise self.error
        return None

    def write(self, data: bytes) -> None:
        """Add input. Raises ToolFailure after the end of the process, and the error that ended the connection."""
        if self.error is not None:
            raise self.error
        if self.end is not None or self._is_input_over:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, "the process has ended, or its input was closed: start another one"
            )
        self._input += data

    def end_input(self) -> None:
        """Let no input follow."""
        self._is_input_over = True

    def next_input(self) -> bytes | str | None:
        """Return the next message with input, or with its end, that this connection has not sent."""
        at = self._sent - self._accepted
        if data := self._input[at : at + MAX_INPUT_BYTES]:
            message = _INPUT.pack(self._sent) + data
            self._sent += len(data)
            return message
        if self._is_input_over and not self._is_end_sent:
            self._is_end_sent = True
            return _CLOSE_STDIN
        return None

    def receive(self, message: str | bytes) -> bool:
        """Handle a message of the service. Return whether it opens the stream. Raises ToolcrewError and SocketLost."""
        if isinstance(message, bytes):
            self._receive_output(message)
            return False
        fields = read_event(message)
        match fields.get("event"):
            case "opened":
                self._open(fields)
                return True
            case "input":
                # It may repeat what the opening has said.
                self._accept(max(_position(fields, "position"), self._accepted))
            case "end":
                self._end(fields)
        return False

    def _open(self, fields: Mapping[str, Any]) -> None:
        first = _position(fields, "from")
        self._lost_before = self.lost_bytes
        self.lost_bytes += first - self.start if isinstance(self.start, int) else 0
        self.start = first
        self._accept(_position(fields, "input_offset"))
        # Messages that the last connection has sent may be lost.
        self._sent, self._is_end_sent = self._accepted, False

    def _receive_output(self, message: bytes) -> None:
        if len(message) < _OUTPUT.size or message[0] not in _STREAMS:
            raise ApiUnavailable("the API sent output that this release cannot read: use the release of the service")
        kind, position = _OUTPUT.unpack_from(message)
        assert isinstance(self.start, int), "the service opens the stream before it sends output"
        data = message[_OUTPUT.size :][max(self.start - position, 0) :]
        position = max(position, self.start)
        self.lost_bytes += position - self.start
        self.start = position + len(data)
        if data:
            self._pieces.append(OutputPiece(_STREAMS[kind], data, position))
            self._unread_bytes += len(data)
        while self._unread_bytes > MAX_UNWATCHED_BYTES + MAX_UNREAD_BYTES:
            self.lost_bytes += len(self._pieces[0].data)
            self.take()

    def _accept(self, position: int) -> None:
        if not self._accepted <= position <= self._accepted + len(self._input):
            raise ApiUnavailable("the API lost a part of the input: start the process again")
        del self._input[: position - self._accepted]
        self._accepted = position
        self._sent = max(self._sent, position)

    def _end(self, fields: Mapping[str, Any]) -> None:
        from toolcrew.contract.process_views import ProcessEnd

        try:
            end = ProcessEnd.model_validate(fields, extra="ignore")
        except ValidationError as error:
            raise ApiUnavailable("the API sent an end that this release cannot read: use its release") from error
        self.lost_bytes = max(self.lost_bytes, self._lost_before + end.lost_bytes)
        self.end = end.model_copy(update={"lost_bytes": self.lost_bytes})


def _position(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 0:
        raise ApiUnavailable(f"the API sent an event without {name}: use the release of the service")
    return value
