"""The text that a terminal shows after a program has moved the cursor, such as the last frame of a progress display.

Time is linear in the text for usual output. Output before the first frame that is drawn at absolute positions is kept.
"""

import re

MAX_CHARS = 64 * 1024
"""Limit of the text. Longer text is not drawn; it only loses its escape sequences."""
_MOVES = re.compile(r"\x1b(?:\[[0-9;?]*[ABCDEFGHJdfu]|M)")
_TOKEN = re.compile(
    r"(?P<text>[^\x1b\r\n\b]+)"
    r"|\x1b\[(?P<numbers>[0-?]*)[ -/]*(?P<command>[@-~])"
    r"|\x1b(?P<short>[M78])"
    r"|(?P<control>[\r\n\b])|."
)
_NUMBER = re.compile(r"[0-9]{1,4}")


def has_cursor_moves(text: str) -> bool:
    """Return whether the text draws over what it has drawn before."""
    return len(text) <= MAX_CHARS and _MOVES.search(text) is not None


def draw(text: str) -> str:
    """Return the text that the terminal shows at the end. It is never longer than `text`."""
    screen = _Screen()
    for token in _TOKEN.finditer(text):
        if token["text"] is not None:
            screen.write(token["text"])
            continue
        screen.spare += len(token[0])
        if token["command"] is not None:
            screen.run(token["command"], [int(number) for number in _NUMBER.findall(token["numbers"])])
        elif token["short"] is not None:
            screen.run({"M": "A", "7": "s", "8": "u"}[token["short"]], [])
        elif token["control"] is not None:
            screen.control(token["control"])
    return "\n".join(screen.lines)


class _Screen:
    """Lines and the cursor. `spare`: number of characters by which the lines may still grow without text."""

    def __init__(self) -> None:
        self.lines = [""]
        self.spare = 0
        self._row = self._column = 0
        # First line of the display that is drawn at absolute positions.
        self._top: int | None = None
        self._saved = (0, 0)
        # True after a carriage return: the next text replaces the line, as elsewhere in `fold`.
        self._is_fresh = False

    def write(self, text: str) -> None:
        line = "" if self._is_fresh else self.lines[self._row]
        self._is_fresh = False
        gap = min(max(0, self._column - len(line)), self.spare)
        self.spare -= gap
        column = min(self._column, len(line) + gap)
        self.lines[self._row] = line[:column].ljust(column) + text + line[column + len(text) :]
        self._column = column + len(text)

    def control(self, control: str) -> None:
        if control == "\n":
            self._is_fresh = False
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.lines):
                self.lines.append("")
                self.spare -= 1
        elif control == "\r":
            self._column, self._is_fresh = 0, True
        else:
            self._column = max(0, self._column - 1)

    def run(self, command: str, numbers: list[int]) -> None:
        """Apply a command. Commands for colors and modes change nothing."""
        count = max(1, numbers[0]) if numbers else 1
        if command in "JK":
            self._erase(command, numbers[0] if numbers else 0)
        elif command in "ABEF":
            self._row = self._clamp(self._row + (count if command in "BE" else -count))
            self._column = 0 if command in "EF" else self._column
        elif command in "CDG":
            self._column = {"C": self._column + count, "D": max(0, self._column - count), "G": count - 1}[command]
        elif command in "Hfd":
            self._column = self._column if command == "d" else (numbers[1] if len(numbers) > 1 else 1) - 1
            self._row = self._go_to(count - 1)
        elif command == "s":
            self._saved = (self._row, self._column)
        elif command == "u":
            self._row, self._column = self._clamp(self._saved[0]), self._saved[1]
        self._is_fresh = self._is_fresh and command in "ABKJm"

    def _clamp(self, row: int) -> int:
        return min(max(0, row), len(self.lines) - 1)

    def _find_top(self) -> int:
        if self._top is None:
            if self.lines[self._row]:
                self.control("\n")
            self._top = self._row
        return self._top

    def _go_to(self, row: int) -> int:
        """Return the index of a line of the display, which may have to be added."""
        wanted = self._find_top() + row
        while len(self.lines) <= wanted and self.spare > 0:
            self.lines.append("")
            self.spare -= 1
        return self._clamp(wanted)

    def _erase(self, command: str, kind: int) -> None:
        if command == "J" and kind >= 2:
            del self.lines[self._find_top() + 1 :]
            self._row = self._clamp(self._row)
            self.lines[self._row] = ""
            return
        line = self.lines[self._row]
        self.lines[self._row] = {
            0: line[: self._column],
            1: " " * min(self._column, len(line)) + line[self._column :],
        }.get(kind, "")
        if command == "J" and kind == 0:
            del self.lines[self._row + 1 :]
