"""Output for who watches: pieces of it sent on while the program runs, as many as there is room for, and never waited for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.reports import ReportWriter

PACE_S = 0.05
"""Pieces that come closer together than this are sent as one: each costs a frame."""
PIECE_BYTES = 32_768
_FRAME_BYTES = 64
_STREAMS = {"stdout": "live", "stderr": "live_stderr", "merged": "live"}


class LiveFeed:
    """`most_bytes` are what may be sent, frames included. What does not fit, or comes while PID 1 is busy, is counted and dropped."""

    __slots__ = ("_buffers", "_left", "_writer", "dropped", "due_at", "sent")

    def __init__(self, writer: ReportWriter, most_bytes: int) -> None:
        self._writer = writer
        self._left = most_bytes
        self._buffers: dict[str, bytearray] = {}
        self.due_at: float | None = None
        self.sent = 0
        self.dropped = 0

    def add(self, name: str, data: bytes, now: float) -> None:
        if self.due_at is None:
            self.due_at = now + PACE_S
        buffer = self._buffers.setdefault(_STREAMS[name], bytearray())
        room = PIECE_BYTES - len(buffer)
        self.dropped += max(0, len(data) - room)
        if room > 0:
            buffer += data[:room]

    def flush(self, now: float, is_last: bool = False) -> None:
        """Send what is due. `is_last`: all of it, waiting where it must: the program has ended."""
        if self.due_at is None or (now < self.due_at and not is_last):
            return
        for stream, buffer in list(self._buffers.items()):
            if self._writer.is_full and not is_last:
                self.due_at = now + PACE_S
                return
            self._send(stream, bytes(buffer), is_last)
            del self._buffers[stream]
        self.due_at = None

    def sizes(self) -> dict[str, int]:
        """`live` of the done event."""
        return {"sent": self.sent, "dropped": self.dropped}

    def _send(self, stream: str, data: bytes, is_last: bool) -> None:
        part = data[: max(0, self._left - _FRAME_BYTES)]
        self.dropped += len(data) - len(part)
        if not part:
            return
        self._left -= len(part) + _FRAME_BYTES
        self.sent += len(part)
        if is_last:
            self._writer.send(stream, part)
        else:
            self._writer.offer(stream, part)
