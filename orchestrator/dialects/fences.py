"""Follows Markdown code fences through streamed text."""

from typing import Literal

_TICK, _TILDE = "`", "~"
_SHORTEST = 3
_DEEPEST_INDENT = 3

_Place = Literal["indent", "run", "info", "other"]
"""Where in a line: before the fence, in its run of ticks or tildes, behind it; or in a line that is no fence."""


class FenceTracker:
    """Knows whether the place it has been fed up to lies inside a code fence. Keeps counts, no text: a line may be of
    any length.
    """

    def __init__(self) -> None:
        self._fence, self._fence_length = "", 0
        self._place: _Place = "indent"
        self._start_line()

    @property
    def is_inside(self) -> bool:
        """Behind an opening fence, its own line included, and before the end of its closing one."""
        return bool(self._fence) or self._opens()

    def feed(self, text: str) -> None:
        start = 0
        while (end := text.find("\n", start)) >= 0:
            self._extend(text, start, end)
            self._end_line()
            start = end + 1
        self._extend(text, start, len(text))

    def interrupt_line(self) -> None:
        """A tag stood here: what it held is data, and its line is no fence."""
        self._place = "other"

    def _start_line(self) -> None:
        self._place = "indent"
        self._indent = self._length = 0
        self._character = ""
        self._has_tick = self._has_info = False

    def _extend(self, text: str, start: int, end: int) -> None:
        while start < end and self._place != "other":
            if self._place == "info":
                rest = text[start:end]
                self._has_tick = self._has_tick or _TICK in rest
                self._has_info = self._has_info or bool(rest.strip())
                return
            start = self._read_indent(text, start) if self._place == "indent" else self._read_run(text, start, end)

    def _read_indent(self, text: str, start: int) -> int:
        character = text[start]
        if character == " " and self._indent < _DEEPEST_INDENT:
            self._indent += 1
        elif character in (_TICK, _TILDE):
            self._place, self._character, self._length = "run", character, 1
        else:
            self._place = "other"
        return start + 1

    def _read_run(self, text: str, start: int, end: int) -> int:
        run = end - start - len(text[start:end].lstrip(self._character))
        self._length += run
        if start + run < end:
            self._place = "info" if self._length >= _SHORTEST else "other"
        return start + run

    def _opens(self) -> bool:
        is_fence = self._place in ("run", "info") and self._length >= _SHORTEST
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
