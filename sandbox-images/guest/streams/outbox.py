"""The frames that wait for the channel: control frames first, then one piece of each stream in turn."""

from __future__ import annotations

import os
import time
from collections import deque

from guest.kernel import WRITE_LATER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.streams.handlers import StreamContext

_QUIET_S = 0.1
_QUIET_BYTES = 4096
_MAX_CONTROL_BYTES = 262_144
_MAX_READY = 128


class ChannelClosed(Exception):
    """Error: the host has closed the channel."""


class SendRate:
    """Counts the bytes that a stream has sent in the last 0.1 s. A stream that sends little goes before the others:
    keys and their echo do not wait for files.
    """

    __slots__ = ("_bytes", "_since")

    def __init__(self) -> None:
        self._since = 0.0
        self._bytes = 0

    def is_quiet(self, now: float) -> bool:
        """Return whether the stream has sent less than 4 KiB in this interval."""
        if now - self._since >= _QUIET_S:
            self._since, self._bytes = now, 0
        return self._bytes < _QUIET_BYTES

    def add(self, count: int) -> None:
        """Count bytes that are sent now."""
        self._bytes += count


class StreamOutbox:
    """The frames that wait for a non-blocking descriptor.

    At most one piece per stream waits, so a stream that sends much holds no memory and delays no other one.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._control_bytes = 0
        self._control: deque[bytes] = deque()
        self._ready: deque[StreamContext] = deque()
        self._current = memoryview(b"")

    @property
    def is_empty(self) -> bool:
        """Return whether nothing waits."""
        return not (self._current or self._control or self._ready)

    @property
    def is_full(self) -> bool:
        """Return whether the server must not read frames now, because each of them may have an answer."""
        return self._control_bytes >= _MAX_CONTROL_BYTES or len(self._ready) >= _MAX_READY

    def put(self, frame: bytes) -> None:
        """Queue a control frame."""
        self._control.append(frame)
        self._control_bytes += len(frame)

    def add_ready(self, context: StreamContext) -> None:
        """Queue a stream that has a piece. Its turn comes after those that wait already."""
        self._ready.append(context)

    def clear(self) -> None:
        """Drop everything but the frame whose begin is already sent."""
        self._control.clear()
        self._ready.clear()
        self._control_bytes = 0

    def flush(self) -> list[StreamContext]:
        """Send as much as possible. Return the streams whose piece has left. Raises ChannelClosed."""
        sent: list[StreamContext] = []
        try:
            while self._current or self._take_next(sent):
                self._current = self._current[os.write(self.fd, self._current) :]
        except OSError as error:
            if error.errno not in WRITE_LATER:
                raise ChannelClosed from error
        return sent

    def _take_next(self, sent: list[StreamContext]) -> bool:
        """Make the next frames the current ones. Return False if there is none."""
        if self._control:
            self._current = memoryview(b"".join(self._control))
            self._control.clear()
            self._control_bytes = 0
            return True
        if not self._ready:
            return False
        now = time.monotonic()
        context = next((context for context in self._ready if context.rate.is_quiet(now)), self._ready[0])
        self._ready.remove(context)
        self._current = memoryview(context.take_piece())
        sent.append(context)
        return True
