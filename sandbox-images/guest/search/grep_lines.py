"""Format matching lines as `path:N: text` and context lines as `path-N- text`, within the limits of the request."""

from __future__ import annotations

import codecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_LINE_CHARS = 500
# Maximum number of bytes of one character in UTF-8.
_CHAR_BYTES = 4
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_GAP = "--\n"


class MatchPosition:
    """Position of a matching line.

    `offset` is the start of the line in the file. `column` is the first byte of the match in the line, from 1.
    """

    __slots__ = ("column", "line", "offset")

    def __init__(self, line: int, column: int, offset: int) -> None:
        self.line = line
        self.column = column
        self.offset = offset


def find_offsets(text: bytes, positions: Iterable[MatchPosition]) -> Iterator[MatchPosition]:
    """Yield the positions, which are in the order of their lines, with the offsets of these lines in the text."""
    line, offset = 1, 0
    for position in positions:
        while line < position.line:
            offset = text.find(b"\n", offset) + 1
            line += 1
        yield MatchPosition(line, position.column, offset)


class MatchPage:
    """The lines of the answer, limited in number and bytes. When `is_full` is set, no further line is accepted."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._remaining_lines = max_lines
        self._remaining_bytes = max_bytes
        self._pending: list[bytes] = []
        self.is_full = False
        self.is_empty = True
        self.cut_lines = 0

    def add(self, line: str) -> bool:
        """Add a line with its line end. Returns whether the line fits."""
        data = line.encode("utf-8", "replace")
        if self.is_full or len(data) > self._remaining_bytes or not self._remaining_lines:
            self.is_full = True
            return False
        self._remaining_bytes -= len(data)
        self._remaining_lines -= 1
        self._pending.append(data)
        self.is_empty = False
        return True

    def take(self) -> bytes:
        """Return the lines that were added since the last call."""
        data = b"".join(self._pending)
        self._pending = []
        return data


class FilePrinter:
    """Formats the matching lines of one file and the lines around them."""

    def __init__(self, page: MatchPage, shown: str, text: bytes, before: int, after: int) -> None:
        self._page = page
        self._shown = shown
        self._text = text
        self._before = before
        self._after = after
        # The line after the last printed line, the offset of that line, and the number of context lines still to
        # print.
        self._next_line = 0
        self._next_offset = 0
        self._remaining_context_lines = 0
        self.matches = 0

    def print_positions(self, positions: Iterable[MatchPosition]) -> None:
        """Add the lines of the positions, which must be in order, to the page. `matches` then has the number of printed
        matches.
        """
        for position in positions:
            if not self._print_until(position):
                return
            is_cut, text = cut_line(self._line_at(position.offset), position.column)
            if not self._page.add(f"{self._shown}:{position.line}: {text}\n"):
                return
            self._page.cut_lines += is_cut
            self.matches += 1
            self._go_on_after(position.line, position.offset)
            self._remaining_context_lines = self._after
        while self._remaining_context_lines and self._print_context():
            self._remaining_context_lines -= 1

    def _print_until(self, position: MatchPosition) -> bool:
        """Print what comes before a matching line: the context after the last match, a mark for a gap, and the context
        before this match.
        """
        while self._remaining_context_lines and self._next_line < position.line and self._print_context():
            self._remaining_context_lines -= 1
        start = max(position.line - self._before, self._next_line, 1)
        if (
            (self._before or self._after)
            and start > self._next_line
            and not self._page.is_empty
            and not self._page.add(_GAP)
        ):
            return False
        if start > self._next_line:
            self._next_offset = self._find_back(position, position.line - start)
            self._next_line = start
        while self._next_line < position.line:
            if not self._print_context():
                return False
        return not self._page.is_full

    def _print_context(self) -> bool:
        """Print the next line as a context line. Returns False at the end of the file or if the page is full."""
        if self._next_offset >= len(self._text):
            return False
        is_cut, text = cut_line(self._line_at(self._next_offset), 1)
        if not self._page.add(f"{self._shown}-{self._next_line}- {text}\n"):
            return False
        self._page.cut_lines += is_cut
        self._go_on_after(self._next_line, self._next_offset)
        return True

    def _go_on_after(self, line: int, offset: int) -> None:
        end = self._text.find(b"\n", offset)
        self._next_line = line + 1
        self._next_offset = len(self._text) if end < 0 else end + 1

    def _find_back(self, position: MatchPosition, lines: int) -> int:
        """Return the start of the line that is `lines` lines before a position."""
        offset = position.offset
        for _ in range(lines):
            offset = self._text.rfind(b"\n", 0, offset - 1) + 1
        return offset

    def _line_at(self, offset: int) -> bytes:
        end = self._text.find(b"\n", offset)
        return self._text[offset : len(self._text) if end < 0 else end].removesuffix(b"\r")


def cut_line(line: bytes, column: int) -> tuple[bool, str]:
    """Return whether the line was cut, and its text.

    A long line is cut to MAX_LINE_CHARS characters around the byte `column` (from 1).
    """
    if len(line) <= MAX_LINE_CHARS:
        return False, line.decode("utf-8", "replace")
    reach = _CHAR_BYTES * MAX_LINE_CHARS
    at = min(max(column - 1, 0), len(line))
    before = _without_partial_start(line[max(0, at - reach) : at]).decode("utf-8", "replace")
    after = _without_partial_end(line[at : at + reach], at + reach < len(line)).decode("utf-8", "replace")
    after_chars = min(len(after), max(MAX_LINE_CHARS // 2, MAX_LINE_CHARS - len(before)))
    before_chars = min(len(before), MAX_LINE_CHARS - after_chars)
    is_left_cut = before_chars < len(before) or at > reach
    is_right_cut = after_chars < len(after) or at + reach < len(line)
    text = before[len(before) - before_chars :] + after[:after_chars]
    return is_left_cut or is_right_cut, f"{'…' * is_left_cut}{text}{'…' * is_right_cut}"


def _without_partial_start(data: bytes) -> bytes:
    """Return the data without the rest of a character at its start. Bytes that are not UTF-8 stay."""
    rest = len(data[:_CHAR_BYTES]) - len(data[:_CHAR_BYTES].lstrip(_CONTINUATIONS))
    return data[rest:] if rest < _CHAR_BYTES else data


def _without_partial_end(data: bytes, is_cut: bool) -> bytes:
    """Return the data without an incomplete character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[1 - _CHAR_BYTES :])
    return data[: len(data) - len(decoder.getstate()[0])] if is_cut else data
