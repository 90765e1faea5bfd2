"""The input of a process: bytes of several writers, each of which arrives once."""

from __future__ import annotations

import errno
import os

from guest.failures import INVALID_ARGUMENTS, RequestFailure
from guest.kernel import WRITE_LATER
from guest.streams.frames import WINDOW_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.streams.handlers import StreamContext

MAX_WRITERS = 64
"""Limit of the names of writers of one process."""
MAX_PENDING_BYTES = 1_048_576
"""Limit of the input that the program has not read, above which a request of the HTTP API is refused."""
_GRANT_BELOW_BYTES = 65_536
_CLOSED = (errno.EPIPE, errno.EIO)


class InputWriter:
    """A writer of a process. `accepted`: the position after the last byte that the server has taken from it."""

    __slots__ = ("accepted",)

    def __init__(self) -> None:
        self.accepted = 0


class WriterStream:
    """A stream through which a writer sends input. The first byte of the stream is at `begin` of the writer's input."""

    def __init__(self, context: StreamContext, writer: InputWriter) -> None:
        self.begin = writer.accepted
        self._context = context
        self._writer = writer
        self._received = 0
        self._owed = WINDOW_BYTES

    def take(self, data: bytes) -> bytes:
        """Count bytes of the stream. Return those that did not arrive through another stream of the same writer."""
        self._owed += len(data)
        position = self.begin + self._received
        self._received += len(data)
        return _accept(self._writer, data, position)

    def pay(self) -> None:
        """Grant the client what it has sent."""
        owed, self._owed = self._owed, 0
        if owed:
            self._context.grant(owed)


class ProcessInput:
    """The standard input or the terminal of a process. `fd` -1: it has no input, or the input is closed."""

    def __init__(self, fd: int, is_terminal: bool) -> None:
        self.fd = fd
        self.pending = bytearray()
        self._is_terminal = is_terminal
        self._closes = False
        self._writers: dict[str, InputWriter] = {}
        self._streams: list[WriterStream] = []

    def find_writer(self, name: str | None) -> InputWriter:
        """Return the writer of this name, or a new one. Raises RequestFailure above MAX_WRITERS names."""
        if name is None:
            return InputWriter()
        if name not in self._writers and len(self._writers) >= MAX_WRITERS:
            raise RequestFailure(
                INVALID_ARGUMENTS, f"the process has {MAX_WRITERS} writers, the limit: use one of their names, or none"
            )
        return self._writers.setdefault(name, InputWriter())

    def open_stream(self, context: StreamContext, writer: InputWriter) -> WriterStream:
        """Let a client write through a stream."""
        stream = WriterStream(context, writer)
        if self.fd >= 0:
            self._streams.append(stream)
        return stream

    def close_stream(self, stream: WriterStream) -> None:
        """Forget a stream. What it has sent is still written."""
        if stream in self._streams:
            self._streams.remove(stream)

    def take(self, data: bytes, is_last: bool) -> None:
        """Take input. `is_last`: the input ends, unless it is a terminal."""
        if self.fd < 0 or self._closes:
            return
        self.pending += data
        self._closes = is_last and not self._is_terminal
        self.flush()

    def request(self, data: bytes, writer: InputWriter, position: int) -> None:
        """Take input of a request, which has no credit. Raises RequestFailure when the input cannot be taken."""
        self.check_open()
        if len(self.pending) + len(data) > MAX_PENDING_BYTES:
            raise RequestFailure(
                INVALID_ARGUMENTS,
                f"the process has not read {len(self.pending)} bytes of earlier input: try again later",
            )
        if position > writer.accepted:
            raise RequestFailure(
                INVALID_ARGUMENTS, f"the input of this writer continues at {writer.accepted}, not at {position}"
            )
        self.take(_accept(writer, data, position), is_last=False)

    def check_open(self) -> None:
        """Raise RequestFailure when the process has no input."""
        if self.fd < 0 or self._closes:
            raise RequestFailure(INVALID_ARGUMENTS, "the process has no input: it was not asked for, or it is closed")

    def request_end(self) -> None:
        """End the input. Raises RequestFailure."""
        self.check_open()
        if self._is_terminal:
            raise RequestFailure(INVALID_ARGUMENTS, "a terminal has no end of input: send its end character (Ctrl-D)")
        self.take(b"", is_last=True)

    def flush(self) -> None:
        """Write as much as the program's pipe accepts now."""
        try:
            while self.pending:
                del self.pending[: os.write(self.fd, self.pending)]
        except OSError as error:
            if error.errno in WRITE_LATER:
                return
            if error.errno not in _CLOSED:
                raise
            self.pending.clear()
            self._closes = not self._is_terminal
        if self._closes and not self._is_terminal:
            self.close()

    def pay(self) -> None:
        """Let the clients send more, unless the program does not read."""
        if len(self.pending) < _GRANT_BELOW_BYTES:
            for stream in self._streams:
                stream.pay()

    def close(self) -> None:
        """Close the input. The master of a terminal is also its output, which closes it."""
        self.pending.clear()
        if self.fd >= 0 and not self._is_terminal:
            os.close(self.fd)
        self.fd = -1


def _accept(writer: InputWriter, data: bytes, position: int) -> bytes:
    """Return the bytes that the writer has not sent yet."""
    rest = data[max(0, writer.accepted - position) :]
    writer.accepted = max(writer.accepted, position + len(data))
    return rest
