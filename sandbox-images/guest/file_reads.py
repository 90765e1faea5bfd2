"""File requests that read: whole lines of a file, or a whole file, streamed and never loaded at once."""

from __future__ import annotations

import os

from guest.confinement import find_place, open_pinned, pin_file
from guest.failures import FILE_TOO_LARGE, OFFSET_OUT_OF_RANGE, Failure, describe_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.bench import Bench
    from guest.file_requests import ReadFileRequest, ReadLinesRequest
    from guest.pipes import Watch
    from guest.places import Places

_BLOCK = 262_144


def read_file(request: ReadFileRequest, bench: Bench) -> dict[str, object]:
    """Send a whole file. Raises Failure; FILE_TOO_LARGE before anything is sent, unless the file grows meanwhile."""
    fd, shown = _open_file(request.path, bench.places)
    declared = os.fstat(fd).st_size
    if declared > request.max_bytes:
        raise _too_large(shown, declared, request.max_bytes)
    size = 0
    for block in _blocks(fd, shown, bench.watch):
        size += len(block)
        if size > request.max_bytes:
            raise _too_large(shown, size, request.max_bytes)
        bench.writer.send("file", block)
    return {"size": size}


def read_lines(request: ReadLinesRequest, bench: Bench) -> dict[str, object]:
    """Send a range of lines and count all of them. A line that `max_bytes` cuts short is sent as far as it goes."""
    fd, shown = _open_file(request.path, bench.places)
    window = LineWindow(request.offset, request.limit, request.max_bytes)
    for block in _blocks(fd, shown, bench.watch):
        bench.writer.send("file", window.take(block))
    if window.lines < request.offset and not (request.offset == 1 and window.lines == 0):
        raise Failure(OFFSET_OUT_OF_RANGE, f"{shown}: has {window.lines} lines, none at {request.offset}", lines=window.lines)
    return {
        "size": window.size,
        "lines": window.lines,
        "offset": request.offset,
        "count": window.count,
        "cut": window.cut,
        "final_newline": window.final_newline,
    }


class LineWindow:
    """A range of lines, picked out of blocks that come in order. Lines end at LF; the last may lack it."""

    def __init__(self, offset: int, limit: int, max_bytes: int) -> None:
        self._first = offset
        self._after = offset + limit
        self._left = max_bytes
        # The line that the next byte belongs to.
        self._line = 1
        self._at_line_start = True
        self.size = 0
        self.count = 0
        self.cut = False

    @property
    def lines(self) -> int:
        return self._line - 1 if self._at_line_start else self._line

    @property
    def final_newline(self) -> bool:
        """Whether nothing is missing at the end: an empty file lacks no newline."""
        return self._at_line_start

    def take(self, block: bytes) -> bytes:
        """The part of a block, not empty, that is to be sent."""
        ends = block.count(b"\n")
        start = self._find_line(block, self._first)
        stop = self._find_line(block, self._after) if start < len(block) else start
        wanted = block[start:stop]
        sent = wanted[: self._left]
        if wanted:
            self._count_sent(sent, max(self._line, self._first))
            self.cut = self.cut or len(sent) < len(wanted)
        self._left -= len(sent)
        self._line += ends
        self._at_line_start = block.endswith(b"\n")
        self.size += len(block)
        return sent

    def _find_line(self, block: bytes, line: int) -> int:
        """Where in the block a line begins; its length when it begins later."""
        at = 0
        for _ in range(line - self._line):
            at = block.find(b"\n", at) + 1
            if at == 0:
                return len(block)
        return at

    def _count_sent(self, sent: bytes, first_line: int) -> None:
        if sent:
            last_line = first_line + sent.count(b"\n") - sent.endswith(b"\n")
            self.count = max(self.count, last_line - self._first + 1)


def _open_file(path: str, places: Places) -> tuple[int, str]:
    place = find_place(path, places, to_read=True)
    try:
        return open_pinned(pin_file(place), os.O_RDONLY), place.shown
    except OSError as error:
        raise describe_os_error(error, place.shown) from None
    finally:
        place.close()


def _blocks(fd: int, shown: str, watch: Watch) -> Iterator[bytes]:
    while True:
        watch.check()
        try:
            block = os.read(fd, _BLOCK)
        except OSError as error:
            raise describe_os_error(error, shown) from None
        if not block:
            return
        yield block


def _too_large(shown: str, size: int, allowed: int) -> Failure:
    return Failure(FILE_TOO_LARGE, f"{shown}: has {size} bytes, more than {allowed}", size=size)
