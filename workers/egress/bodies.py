"""Bodies of HTTP/1.1 messages taken apart and framed anew, so that both sides see the same end."""

import re
from typing import Protocol

from workers.egress.headers import Framing, HeadError

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}:[\t\x20-\x7e\x80-\xff]*")
_MAX_LINE_BYTES = 4096
_MAX_TRAILER_BYTES = 16 * 1024


class Body(Protocol):
    """A body as it comes. `is_done`: its end was seen; what came behind it is dropped."""

    is_done: bool

    def take(self, data: bytes) -> bytes:
        """The content in `data`. Raises HeadError when it is not framed as it must be."""
        ...

    def finish(self) -> None:
        """The connection ended. Raises HeadError when that is in the middle."""
        ...


class ExactBody:
    """`length` bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_done = length == 0

    def take(self, data: bytes) -> bytes:
        content = data[: self._left]
        self._left -= len(content)
        self.is_done = self._left == 0
        return content

    def finish(self) -> None:
        if not self.is_done:
            raise HeadError(f"its body ended {self._left} bytes before its end")


class OpenBody:
    """Everything until the connection ends."""

    is_done = False

    def take(self, data: bytes) -> bytes:
        return data

    def finish(self) -> None:
        self.is_done = True


class ChunkedBody:
    """In chunks. Extensions and trailers are checked and dropped."""

    def __init__(self) -> None:
        self._held = b""
        self._at = 0
        self._left = 0
        self._step = self._read_size
        self._trailer_bytes = 0
        self.is_done = False

    def take(self, data: bytes) -> bytes:
        # One copy of what is left over, however small the chunks: a step that copied would make small ones dear.
        self._held, self._at = self._held[self._at :] + data, 0
        pieces: list[bytes] = []
        while not self.is_done and (piece := self._step()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def finish(self) -> None:
        if not self.is_done:
            raise HeadError("its body ended in the middle of its chunks")

    def _read_size(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise HeadError("the size of a chunk is not a number")
        self._left = int(match[1], 16)
        self._step = self._read_content if self._left else self._read_trailer
        return b""

    def _read_content(self) -> bytes | None:
        content = self._held[self._at : self._at + self._left]
        self._at += len(content)
        self._left -= len(content)
        if not self._left:
            self._step = self._read_end
        return content or None

    def _read_end(self) -> bytes | None:
        end = self._held[self._at : self._at + 2]
        if end != b"\r\n"[: len(end)]:
            raise HeadError("a chunk is not as long as it says")
        if len(end) < 2:
            return None
        self._at += 2
        self._step = self._read_size
        return b""

    def _read_trailer(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _MAX_TRAILER_BYTES or (line and not _TRAILER.fullmatch(line)):
            raise HeadError("what follows its last chunk is not made of header lines")
        self.is_done = not line
        return b""

    def _take_line(self) -> bytes | None:
        end = self._held.find(b"\r\n", self._at, self._at + _MAX_LINE_BYTES + 2)
        if end < 0:
            if len(self._held) - self._at > _MAX_LINE_BYTES:
                raise HeadError("a line between its chunks is too long")
            return None
        line = self._held[self._at : end]
        self._at = end + 2
        return line


def build_body(framing: Framing, *, is_open: bool) -> Body:
    """The reader of a body; without a length it has none, or, when `is_open`, ends with the connection."""
    if framing.is_chunked:
        return ChunkedBody()
    if framing.length is None and is_open:
        return OpenBody()
    return ExactBody(framing.length or 0)


def encode_chunk(content: bytes) -> bytes:
    """One chunk; nothing for no content, which would be the last one."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


LAST_CHUNK = b"0\r\n\r\n"
