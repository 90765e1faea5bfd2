"""What is kept of a stream: its head and its tail, in memory bounded by the cap."""

from __future__ import annotations


class Capture:
    """The first quarter of `cap` bytes and the last three quarters; what lies between is counted and dropped.

    A stream of at most `cap` bytes is kept whole, as head and tail that join.
    """

    __slots__ = ("_end", "_head", "_head_cap", "_tail", "_tail_cap", "total")

    def __init__(self, cap: int) -> None:
        self._head_cap = cap // 4
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        # A ring: once it is full, `_end` is where the oldest byte is overwritten.
        self._tail = bytearray()
        self._end = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_cap:
            self._add_to_tail(data[-self._tail_cap :])

    def _add_to_tail(self, data: bytes) -> None:
        room = self._tail_cap - len(self._tail)
        if room > 0:
            self._tail += data[:room]
            data = data[room:]
        first = min(len(data), self._tail_cap - self._end)
        self._tail[self._end : self._end + first] = data[:first]
        rest = len(data) - first
        self._tail[:rest] = data[first:]
        self._end = rest if rest else (self._end + first) % self._tail_cap

    def head(self) -> bytes:
        return bytes(self._head)

    def tail(self) -> bytes:
        return bytes(self._tail[self._end :] + self._tail[: self._end])

    def sizes(self) -> dict[str, int]:
        """The entry of `done`'s streams."""
        return {"total": self.total, "head": len(self._head), "tail": len(self._tail)}
