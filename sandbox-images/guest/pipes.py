"""What a supervisor shares with PID 1, and the body of the call it serves."""

from __future__ import annotations

import os
import time

from guest.failures import CANCELLED, TIMEOUT, Failure
from guest.handover import hears_cancel

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

    from guest.progress import Progress
    from guest.reports import ReportWriter

_MAX_FDS = 4096


class SupervisorEnds:
    """A supervisor's ends: reports up, calls and words of cancel down, and how far it is."""

    __slots__ = ("channel", "progress", "writer")

    def __init__(self, writer: ReportWriter, channel: _socket.socket, progress: Progress) -> None:
        self.writer = writer
        self.channel = channel
        self.progress = progress

    def close_all_others(self, *kept: int | None) -> None:
        """Close every descriptor from 3 on but these ends and `kept`."""
        low = 2
        for fd in sorted(fd for fd in (self.writer.fd, self.channel.fileno(), *kept) if fd is not None):
            os.closerange(low + 1, fd)
            low = fd
        os.closerange(low + 1, _MAX_FDS)


class CallPipes:
    """What serves one call: its supervisor's ends, and its body."""

    __slots__ = ("_channel", "_progress", "body", "control", "writer")

    def __init__(self, ends: SupervisorEnds, body: int | None) -> None:
        self.writer = ends.writer
        self.control = ends.channel.fileno()
        self.body = body
        self._channel = ends.channel
        self._progress = ends.progress

    def settle(self) -> None:
        """Tell PID 1's watchdog that nothing of the call runs any more."""
        self._progress.settle()

    def read_body(self, size: int) -> bytes:
        """The body's first bytes."""
        return os.pread(self.body, size, 0) if self.body is not None and size else b""

    def open_stdin(self, offset: int) -> int:
        """The rest of the body as a file to read, /dev/null when there is none."""
        if self.body is None or os.fstat(self.body).st_size <= offset:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        fd = os.open(f"/proc/self/fd/{self.body}", os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(fd, offset, os.SEEK_SET)
        return fd

    def check_cancel(self) -> None:
        """Raises Failure(CANCELLED) when PID 1 has said so."""
        if hears_cancel(self._channel):
            raise Failure(CANCELLED, "cancelled")


class Watch:
    """The limit of a file request; asked between two pieces of work."""

    def __init__(self, pipes: CallPipes, timeout_s: float) -> None:
        self._pipes = pipes
        self._timeout_s = timeout_s
        self._limit_at = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raises Failure(TIMEOUT) or Failure(CANCELLED)."""
        if time.monotonic() >= self._limit_at:
            raise Failure(TIMEOUT, f"not done after {self._timeout_s:g} s")
        self._pipes.check_cancel()
