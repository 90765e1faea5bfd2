"""Selects one page of lines from text that arrives in pieces. Lines before and after the page are only counted."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain, repeat
from operator import add

from guest.files.requests import LINE_CHARS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_CUTS = 100
"""Maximum number of cut lines in one page. Each cut line is reported."""


class LinePage:
    """Page of lines.

    A line ends at LF or CRLF. The last line may have no line end. `column` applies to the first line of the page.
    """

    def __init__(self, offset: int, limit: int, column: int, max_bytes: int) -> None:
        self._offset = offset
        self._limit = limit
        self._skip = column - 1
        self._remaining_bytes = max_bytes
        # Number of newlines so far, and number of characters after the last newline.
        self._newlines = 0
        self._length = 0
        # The visible part of the current line, and one more character, which may be the CR of a CRLF.
        self._begun: list[str] = []
        self._begun_chars = 0
        self._last_sign = ""
        self.shown: list[str] = []
        self.cuts: list[tuple[int, int, int]] = []
        """(line, last character shown, characters of the line) of each cut line."""
        self.first_length = 0
        """Number of characters of the first line of the page, once that line has arrived."""
        self.is_out_of_room = False
        """True if another line of the page did not fit."""
        self.crlf = 0
        self.has_cr = False

    @property
    def lines(self) -> int:
        """Number of lines so far."""
        return self._newlines + (self._length > 0)

    @property
    def newlines(self) -> int:
        return self._newlines

    @property
    def has_final_newline(self) -> bool:
        """Return whether no newline is missing at the end of the text. An empty file counts as complete."""
        return self._length == 0

    @property
    def is_complete(self) -> bool:
        """Return whether the page is full, so that no later text is shown."""
        return self.is_out_of_room or len(self.shown) >= self._limit

    @property
    def is_reached(self) -> bool:
        """Return whether the page has begun."""
        return self._newlines + 1 >= self._offset

    def take(self, text: str) -> None:
        """Process the next piece of the text."""
        if "\r" in text or self._last_sign == "\r":
            self._count_returns(text)
        newlines = text.count("\n")
        if self.is_complete or self._newlines + newlines + 1 < self._offset:
            self._pass(text, newlines)
        else:
            self._show(text)
        self._last_sign = text[-1:] or self._last_sign

    def finish(self) -> None:
        """End the page. An unfinished line is shown as far as it has arrived.

        Call this at the end of the text, or when the caller reads no more.
        """
        if self._length and self.is_reached and not self.is_complete:
            self._end_line(is_whole=False)

    def _count_returns(self, text: str) -> None:
        self.has_cr = True
        self.crlf += text.count("\r\n") + (self._last_sign == "\r" and text.startswith("\n"))

    def _pass(self, text: str, newlines: int) -> None:
        self._newlines += newlines
        self._length = len(text) - 1 - text.rfind("\n") if newlines else self._length + len(text)

    def _show(self, text: str) -> None:
        before = self._offset - 1 - self._newlines
        if before > 0:
            # Skip to the first line of the page, and drop earlier parts of the text without further work.
            text = text.split("\n", before)[-1]
            self._newlines += before
            self._length = 0
        at = 0
        while not self.is_complete:
            at += self._show_run(text, at)
            if self.is_complete:
                break
            end = text.find("\n", at)
            if end < 0:
                self._begin(text[at:])
                return
            self._begin(text[at:end])
            self._end_line(is_whole=True)
            self._newlines += 1
            self._length = 0
            at = end + 1
        rest = text[at:]
        self._pass(rest, rest.count("\n"))

    def _show_run(self, text: str, at: int) -> int:
        """Show many lines at once, up to the first line that is incomplete, too long or does not fit.

        Returns the number of characters that were consumed.
        """
        if self._length or (self._skip and not self.shown):
            return 0
        # A character has at least one byte in UTF-8, so text beyond this limit cannot fit.
        chunk = text[at : at + self._remaining_bytes + 1]
        run = chunk.split("\n", self._limit - len(self.shown))[:-1]
        if max(map(len, run), default=0) > LINE_CHARS:
            run = run[: next(index for index, line in enumerate(run) if len(line) > LINE_CHARS)]
        lines = [line.removesuffix("\r") for line in run] if "\r" in chunk else run
        sizes = list(map(len, lines if chunk.isascii() else [line.encode("utf-8", "replace") for line in lines]))
        count, cost = len(lines), sum(sizes) + _frame_bytes(self._newlines + 1, len(lines))
        if cost > self._remaining_bytes:
            totals = list(accumulate(map(add, sizes, _frames(self._newlines + 1, len(lines)))))
            count = bisect_right(totals, self._remaining_bytes)
            cost = totals[count - 1]
        if count == 0:
            return 0
        if not self.shown:
            self.first_length = len(lines[0])
        self.shown += lines[:count]
        self._remaining_bytes -= cost
        self._newlines += count
        return sum(map(len, run[:count])) + count

    def _begin(self, part: str) -> None:
        """Add a part to the current line."""
        skip = self._skip if not self.shown else 0
        max_chars = LINE_CHARS + 1 - self._begun_chars
        shown = part[max(0, skip - self._length) :][:max_chars] if max_chars > 0 else ""
        if shown:
            self._begun.append(shown)
            self._begun_chars += len(shown)
        self._length += len(part)
        self._last_sign = part[-1:] or self._last_sign

    def _end_line(self, is_whole: bool) -> None:
        number = self._newlines + 1
        skip = self._skip if not self.shown else 0
        length = self._length - (is_whole and self._length > 0 and self._last_sign == "\r")
        if not self.shown:
            self.first_length = length
        text = "".join(self._begun)[: max(0, min(LINE_CHARS, length - skip))]
        self._begun, self._begun_chars = [], 0
        cost = len(text.encode("utf-8", "replace")) + next(_frames(number, 1))
        if self.shown and (cost > self._remaining_bytes or len(self.cuts) >= _MAX_CUTS):
            self.is_out_of_room = True
            return
        self._remaining_bytes -= cost
        self.shown.append(text)
        if skip + len(text) < length:
            self.cuts.append((number, skip + len(text), length))


def _frames(first: int, count: int) -> Iterator[int]:
    """For each shown line, yield the bytes that it needs in addition to its text: for the line number, a tab and a
    newline.
    """
    return chain.from_iterable(repeat(size, alike) for size, alike in _frame_runs(first, count))


def _frame_bytes(first: int, count: int) -> int:
    """Return the sum of `_frames`."""
    return sum(size * alike for size, alike in _frame_runs(first, count))


def _frame_runs(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (extra bytes per line, number of consecutive lines with that size)."""
    while count > 0:
        digits = len(str(first))
        alike = min(count, 10**digits - first)
        yield digits + 2, alike
        first += alike
        count -= alike
