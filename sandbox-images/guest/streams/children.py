"""The children of the stream server, each with the function that gets its exit status."""

from __future__ import annotations

import os
import select
import signal
import time

from guest.processes import reap
from guest.streams.handlers import EventSource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.streams.handlers import Poller

# A child that sends no SIGCHLD is reaped at the next look.
_REAP_PACE_S = 1.0


class Children(EventSource):
    """Collects all children of this process: its own, and orphans of its programs, whose subreaper it is."""

    def __init__(self) -> None:
        self._on_exit: dict[int, Callable[[int], None]] = {}
        self._wakeups, wakeups_w = os.pipe()
        for fd in (self._wakeups, wakeups_w):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeups_w, warn_on_full_buffer=False)
        # The number of the signal is written to the pipe only if the signal has a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit` with the wait status when this child has exited."""
        self._on_exit[pid] = on_exit
        self.wake_at = time.monotonic() + _REAP_PACE_S

    def register(self, poller: Poller) -> None:
        """Wait for SIGCHLD."""
        poller.register(self._wakeups, select.POLLIN)

    def serve(self, fd: int, events: int) -> None:
        """Collect the children that have exited."""
        os.read(fd, 4096)
        self.wake()

    def wake(self) -> None:
        """Collect the children that have exited."""
        is_alone = reap(self._tell)
        self.wake_at = None if is_alone else time.monotonic() + _REAP_PACE_S

    def _tell(self, pid: int, status: int) -> None:
        on_exit = self._on_exit.pop(pid, None)
        if on_exit is not None:
            on_exit(status)
