"""Frames on their way to the host: PID 1 writes what its stdout takes and never waits for it."""

from __future__ import annotations

import os
import select
import time
from collections import deque

_LAST_FLUSH_S = 1.0


class HostGone(Exception):
    """Nobody reads the guest's stdout any more."""


class Outbox:
    """A queue in front of a non-blocking descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.size = 0
        self._frames: deque[memoryview] = deque()

    def put(self, frame: bytes) -> None:
        """Queue a frame and send what can be sent now. Raises HostGone."""
        self._frames.append(memoryview(frame))
        self.size += len(frame)
        self.flush()

    def flush(self) -> None:
        try:
            while self._frames:
                sent = os.write(self.fd, self._frames[0])
                self.size -= sent
                if sent == len(self._frames[0]):
                    self._frames.popleft()
                else:
                    self._frames[0] = self._frames[0][sent:]
        except BlockingIOError:
            return
        except OSError as error:
            raise HostGone from error

    def flush_last(self) -> None:
        """Before the end: give the host a moment, and no more, to take the rest."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        give_up_at = time.monotonic() + _LAST_FLUSH_S
        while self._frames and poller.poll(max(0, int((give_up_at - time.monotonic()) * 1000))):
            self.flush()
            if time.monotonic() >= give_up_at:
                return
