"""Follows Markdown code fences through streamed text."""

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)")


class FenceTracker:
    """Knows whether the place it has been fed up to lies inside a code fence. Keeps the current line's text only while it may be a fence."""

    def __init__(self) -> None:
        self._fence = ""
        self._line: str | None = ""

    @property
    def is_inside(self) -> bool:
        """Behind an opening fence, its own line included, and before the end of its closing one."""
        return bool(self._fence) or self._opening() is not None

    def feed(self, text: str) -> None:
        start = 0
        while (end := text.find("\n", start)) >= 0:
            self._extend(text[start:end])
            self._end_line()
            start = end + 1
        self._extend(text[start:])

    def _extend(self, text: str) -> None:
        if self._line is None:
            return
        # An opening fence's info text may be long; only a closing fence, a short line, needs all of it.
        line = self._line + text[:256]
        self._line = line[:512] if line.lstrip(" ")[:3] in ("", "`", "``", "```", "~", "~~", "~~~") else None

    def _opening(self) -> str | None:
        found = _FENCE.match(self._line) if self._line is not None else None
        if found is None or (found[1][0] == "`" and "`" in found[2]):
            return None
        return found[1]

    def _end_line(self) -> None:
        found = _FENCE.match(self._line) if self._line is not None else None
        if not self._fence:
            self._fence = self._opening() or ""
        elif found is not None and found[1].startswith(self._fence) and not found[2].strip():
            self._fence = ""
        self._line = ""
