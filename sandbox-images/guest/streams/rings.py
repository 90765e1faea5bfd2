"""The last output of a process, with one position for its standard output and its standard error."""

from __future__ import annotations

from array import array
from bisect import bisect_right

RING_BYTES = 1_048_576
"""Limit of a ring."""
ALL_RINGS_BYTES = 8_388_608
"""Limit of all rings of the server together."""
_SLACK_BYTES = 65_536
# A change between the two outputs takes memory too. A program that changes after each byte must not fill more.
_CHANGE_BYTES = 16


class OutputRing:
    """The output from the position `start` to the position `end`. Older output is lost."""

    def __init__(self) -> None:
        self.start = 0
        self._data = bytearray()
        # The positions after `start` at which the output changes between standard output and standard error.
        self._changes = array("Q")
        self._begins_with_stderr = False

    @property
    def end(self) -> int:
        """Return the position after the last byte."""
        return self.start + len(self._data)

    @property
    def size(self) -> int:
        """Return the bytes that the ring holds."""
        return len(self._data) + _CHANGE_BYTES * len(self._changes)

    def add(self, data: bytes, is_stderr: bool) -> None:
        """Append output. Drop the oldest output above RING_BYTES."""
        if not self._data:
            self._begins_with_stderr = is_stderr
        elif is_stderr != self._is_stderr(len(self._changes)):
            self._changes.append(self.end)
        self._data += data
        # Drop much at once: each time, the rest of `_changes` is moved.
        if self.size > RING_BYTES + _SLACK_BYTES:
            self.shrink(RING_BYTES)

    def shrink(self, limit: int) -> None:
        """Drop the oldest output until at most `limit` bytes are held."""
        while self.size > limit:
            self._drop(min(self.size - limit, len(self._data)))

    def read(self, position: int, count: int) -> tuple[bytes, bool]:
        """Return at most `count` bytes of one kind from a position in the ring, and whether they are standard error."""
        at = bisect_right(self._changes, position)
        end = min(position + count, self._changes[at] if at < len(self._changes) else self.end)
        with memoryview(self._data) as view:
            return bytes(view[position - self.start : end - self.start]), self._is_stderr(at)

    def _drop(self, count: int) -> None:
        del self._data[:count]
        self.start += count
        passed = bisect_right(self._changes, self.start)
        self._begins_with_stderr = self._is_stderr(passed)
        del self._changes[:passed]

    def _is_stderr(self, changes: int) -> bool:
        """Return whether the output after so many changes is standard error."""
        return self._begins_with_stderr != bool(changes & 1)
