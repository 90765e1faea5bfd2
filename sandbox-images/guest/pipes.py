"""What a call's process shares with PID 1."""

from __future__ import annotations

import os
import time

from guest.failures import CANCELLED, TIMEOUT, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mmap import mmap

    from guest.reports import ReportWriter

_MAX_FDS = 4096


class CallPipes:
    """What a call's process shares with PID 1: reports up, a word of cancel down, the request's body, a flag.

    `oom_kills` is the cgroup's counter at the start. `settled` is shared memory: it reaches PID 1 even when the pipe is full of output that nobody takes.
    """

    def __init__(self, writer: ReportWriter, control: int, body: int | None, settled: mmap, oom_kills: int | None) -> None:
        self.writer = writer
        self.control = control
        self.body = body
        self.oom_kills = oom_kills
        self._settled = settled

    def settle(self) -> None:
        """Tell PID 1's watchdog that nothing of the call runs any more."""
        self._settled[0] = 1

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
        try:
            os.read(self.control, 1)
        except BlockingIOError:
            return
        raise Failure(CANCELLED, "cancelled")

    def close_others(self) -> None:
        """Close what belongs to PID 1 and to other calls."""
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1):
            # The numbers stay taken, so that no pipe of a program lands on them.
            os.dup2(null, fd, inheritable=False)
        low = 2
        for fd in sorted(fd for fd in (self.writer.fd, self.control, self.body) if fd is not None):
            os.closerange(low + 1, fd)
            low = fd
        os.closerange(low + 1, _MAX_FDS)


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
