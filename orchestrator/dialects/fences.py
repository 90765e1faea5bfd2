"""Detects Markdown code fences in streamed text."""

import re
from typing import Literal

_TICK, _TILDE = "`", "~"
_SHORTEST = 3
_DEEPEST_INDENT = 3

_LinePart = Literal["indent", "run", "info", "other"]
"""Position within a line: before a fence, in the backticks or tildes of the fence, or after them. "other": the line is
no fence line.
"""


class FenceTracker:
    """Tracks whether the end of the text read so far lies inside a code fence.

    It keeps counts and no text, so a line of any length costs constant memory.
    """

    def __init__(self) -> None:
        self._fence = ""
        self._fence_length = 0
        self._line_part: _LinePart = "indent"
        self._start_line()

    @property
    def is_inside(self) -> bool:
        """True from the line of an opening fence to the end of the closing fence."""
        return bool(self._fence) or self._opens()

    def feed(self, text: str) -> None:
        start = 0
        while (end := text.find("\n", start)) >= 0:
            self._extend(text, start, end)
            self._end_line()
            start = end + 1
        self._extend(text, start, len(text))

    def interrupt_line(self) -> None:
        """Record that a tag occurred in this line. The tag's content is data, so the line is no fence."""
        self._line_part = "other"

    def _start_line(self) -> None:
        self._line_part = "indent"
        self._indent = self._length = 0
        self._character = ""
        self._has_tick = self._has_info = False

    def _extend(self, text: str, start: int, end: int) -> None:
        while start < end and self._line_part != "other":
            if self._line_part == "info":
                info = text[start:end]
                self._has_tick = self._has_tick or _TICK in info
                self._has_info = self._has_info or bool(info.strip())
                return
            start = self._read_indent(text, start) if self._line_part == "indent" else self._read_run(text, start, end)

    def _read_indent(self, text: str, start: int) -> int:
        character = text[start]
        if character == " " and self._indent < _DEEPEST_INDENT:
            self._indent += 1
        elif character in (_TICK, _TILDE):
            self._line_part, self._character, self._length = "run", character, 1
        else:
            self._line_part = "other"
        return start + 1

    def _read_run(self, text: str, start: int, end: int) -> int:
        run = end - start - len(text[start:end].lstrip(self._character))
        self._length += run
        if start + run < end:
            self._line_part = "info" if self._length >= _SHORTEST else "other"
        return start + run

    def _opens(self) -> bool:
        is_fence = self._line_part in ("run", "info") and self._length >= _SHORTEST
        return is_fence and not (self._character == _TICK and self._has_tick)

    def _end_line(self) -> None:
        if not self._fence:
            if self._opens():
                self._fence, self._fence_length = self._character, self._length
        elif (
            self._opens()
            and self._character == self._fence
            and self._length >= self._fence_length
            and not self._has_info
        ):
            self._fence = ""
        self._start_line()


_SHELL_OPENING = re.compile(r"^ {0,3}```(?:bash|sh|shell|console)[ \t]*\n", re.MULTILINE)
_CLOSING = re.compile(r"^ {0,3}```[ \t]*$", re.MULTILINE)
_PROMPT = re.compile(r"^\$ ", re.MULTILINE)


_WHOLE_OPENING = re.compile(r"```[a-zA-Z]*+[ \t]*+\r?\n")


def strip_fence(text: str) -> str:
    """Return the content of a text that is one code block; any other text unchanged."""
    opening = _WHOLE_OPENING.match(text)
    return text[opening.end() : -3].strip() if opening and text.endswith("```", opening.end()) else text


def find_command(text: str) -> str | None:
    """Return the command in the first shell code block of a text, without `$ ` prompts; None if there is none."""
    opening = _SHELL_OPENING.search(text)
    # One pattern for the whole block would search for an end after every opening: quadratic time in a model's text.
    closing = _CLOSING.search(text, opening.end()) if opening is not None else None
    if opening is None or closing is None:
        return None
    return _PROMPT.sub("", text[opening.end() : closing.start()]).strip() or None
