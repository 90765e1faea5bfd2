"""Search with Python's regular expressions.

This engine is used without ripgrep, and for patterns that only Python accepts. It runs in a process of its own that
can be killed, because compiling or matching such a pattern may take an unlimited time.
"""

from __future__ import annotations

import bisect
import os
import re

from guest.failures import INVALID_PATTERN, Failure
from guest.search.grep_children import Child, start_function, write_all
from guest.search.grep_files import open_file, read_text
from guest.search.grep_records import read_counts, read_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from guest.search.grep_patterns import GrepPattern


class PythonEngine:
    """Python engine of one search. Its output has the same format as the output of ripgrep."""

    name = "python"

    def __init__(self, pattern: GrepPattern) -> None:
        self._pattern = pattern

    def start_counting(
        self, names_only: bool, folder: int, paths: list[bytes], use_openat2: bool
    ) -> Callable[[int, int], int]:
        """Return a start function that counts the matching lines of all files, for `read_counting`."""

        def work(out: int, errors: int) -> None:
            regex = self._pattern.compile()
            for path in paths:
                try:
                    fd = open_file(folder, path, use_openat2)
                except OSError as error:
                    write_all(
                        errors,
                        b"./%s: %s (os error %d)\n" % (path, os.strerror(error.errno or 0).encode(), error.errno or 0),
                    )
                    continue
                self._count(regex, out, fd, b"./" + path, names_only)

        return start_function(work)

    def start_counting_one(self, fd: int, names_only: bool) -> Callable[[int, int], int]:
        """Return a start function that counts the matching lines of one open file."""
        return start_function(
            lambda out, _: self._count(self._pattern.compile(), out, fd, b"/proc/self/fd/%d" % fd, names_only)
        )

    def start_marking(self, fds: list[int], most: int | None) -> Callable[[int, int], int]:
        """Return a start function that lists the matching lines of open files, for `group_marks`.

        Each file has at most `most` lines.
        """

        def work(out: int, _: int) -> None:
            regex = self._pattern.compile()
            for fd in fds:
                for number, (line, column, offset) in enumerate(self._find(regex, read_text(fd))):
                    if most is not None and number >= most:
                        break
                    write_all(out, b"/proc/self/fd/%d\0%d::%d::%d::\n" % (fd, line, column, offset))

        return start_function(work)

    @staticmethod
    def read_counting(child: Child, names_only: bool, is_late: Callable[[], bool]) -> Iterator[tuple[bytes, int]]:
        """Yield (path, count) of each matching file, from a process of `start_counting`."""
        records = child.read_records(b"\0", is_late)
        return read_names(records) if names_only else read_counts(records)

    @staticmethod
    def explain(complaint: str) -> Failure:
        """Convert an error message about the pattern to a failure."""
        return Failure(INVALID_PATTERN, complaint)

    def _count(self, regex: re.Pattern[str], out: int, fd: int, path: bytes, names_only: bool) -> None:
        try:
            text = read_text(fd)
        finally:
            os.close(fd)
        if names_only:
            if next(self._find(regex, text), None) is not None:
                write_all(out, path + b"\0")
            return
        count = sum(1 for _ in self._find(regex, text))
        if count:
            write_all(out, b"%s\0%d\n" % (path, count))

    def _find(self, regex: re.Pattern[str], text: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (line, column, offset) of each line that contains a match or a part of a match."""
        if not self._pattern.multiline:
            yield from _find_lines(text, regex)
            return
        starts = [0, *(found.end() for found in re.finditer(b"\n", text))]
        if starts[-1] == len(text):
            # The text after the last line end is empty and is not a line.
            starts.pop()
        told = 0
        for start, end in _find_spans(text, regex):
            first = bisect.bisect_right(starts, start)
            # A line end at the end of a match belongs to the line before it.
            last = bisect.bisect_right(starts, max(start, end - 1))
            if start == len(text) and text.endswith(b"\n"):
                return
            for line in range(max(first, told + 1), last + 1):
                yield line, start - starts[line - 1] + 1 if line == first else 1, starts[line - 1]
            told = max(told, last)


def _find_spans(text: bytes, regex: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each match of a multiline search, in bytes."""
    decoded = text.decode("utf-8", "surrogateescape")
    at = size = 0
    for found in regex.finditer(decoded):
        size += len(decoded[at : found.start()].encode("utf-8", "surrogateescape"))
        at = found.start()
        yield size, size + len(found.group().encode("utf-8", "surrogateescape"))


def _find_lines(text: bytes, regex: re.Pattern[str]) -> Iterator[tuple[int, int, int]]:
    offset = 0
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        found = regex.search(line.removesuffix(b"\r").decode("utf-8", "surrogateescape"))
        if found:
            yield number, len(found.string[: found.start()].encode("utf-8", "surrogateescape")) + 1, offset
        offset += len(line) + 1
