"""PID 1's record of the stream channel: it waits for the first byte, and then forks the stream server."""

from __future__ import annotations

import _socket
import os
import select
import stat
import time

from guest.kernel import close_descriptors_except

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import NoReturn

    from guest.paths import GuestPaths

CHANNEL = 3
"""Descriptor of the channel, if the host gave one to PID 1."""
# A program of the sandbox may kill the server repeatedly.
_RESTART_S = 1.0


class StreamChannel:
    """The channel of the stream server. While a server runs, the channel belongs to it."""

    def __init__(self, paths: GuestPaths) -> None:
        self._paths = paths
        self._is_open = _is_socket(CHANNEL)
        if self._is_open:
            os.set_inheritable(CHANNEL, False)
        self._pid = 0
        self._life = -1
        self._must_start = False
        self._start_at = 0.0
        self.is_ending = False
        """Whether the server has ended and was not reaped."""

    @property
    def pids(self) -> Set[int]:
        """Return the pid of the server, if it runs or was not reaped."""
        return {self._pid} if self._pid else set()

    def register(self, poller: select.poll) -> None:
        """Wait for the first byte, or for the end of the server."""
        if self._life >= 0:
            poller.register(self._life, 0)
        elif self._is_open and not self._pid and not self._must_start:
            poller.register(CHANNEL, select.POLLIN)

    def serve(self, fd: int) -> bool:
        """Serve an event. Return whether the descriptor was one of these."""
        if fd == self._life:
            os.close(self._life)
            self._life = -1
            self.is_ending = True
        elif fd == CHANNEL and self._is_open:
            self._must_start = self._has_data()
            self._is_open = self._must_start
        else:
            return False
        return True

    def find_wake_at(self) -> float | None:
        """Return the time at which `start` must be called, or None."""
        return self._start_at if self._must_start else None

    def start(self) -> None:
        """Fork the server if it is time."""
        if not self._must_start or time.monotonic() < self._start_at:
            return
        self._start_at = time.monotonic() + _RESTART_S
        try:
            self._fork()
        except OSError:
            return  # no memory or too many processes: try again at the next time
        self._must_start = False

    def note_exit(self, pid: int) -> bool:
        """Record the exit of the server. Return False for another process.

        The next server begins at once, to tell the client that the streams are lost.
        """
        if pid != self._pid:
            return False
        self._pid = 0
        self.is_ending = False
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        self._must_start = self._is_open = self._has_data(if_silent=True)
        return True

    def _has_data(self, if_silent: bool = False) -> bool:
        """Return whether the channel has a byte. `if_silent`: the result for an open channel without one."""
        channel = _socket.socket(fileno=CHANNEL)
        try:
            return bool(channel.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT))
        except BlockingIOError:
            return if_silent
        except OSError:
            return False
        finally:
            channel.detach()

    def _fork(self) -> None:
        life, servers_life = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._be_server(servers_life)
        except OSError:
            os.close(life)
            raise
        finally:
            os.close(servers_life)
        self._pid, self._life = pid, life

    def _be_server(self, life: int) -> NoReturn:
        try:
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            for fd in (0, 1):
                # Keep descriptors 0 and 1 open, so that no pipe of a program gets these numbers.
                os.dup2(null, fd, inheritable=False)
            close_descriptors_except(CHANNEL, life)
            # Import these only here: PID 1 must stay small.
            from guest.streams.entry import serve_streams

            serve_streams(CHANNEL, CHANNEL, self._paths)
        finally:
            # The server must never return into PID 1's loop, even after an exception.
            os._exit(0)


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
