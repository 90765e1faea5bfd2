"""Start the search process, read its output while it runs, and kill it when the time is up.

The process has no terminal, no input and no shell.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import time

from guest.paths import ENVIRONMENT
from guest.processes import offer_to_oom_killer
from guest.search.left_out import LeftOut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_READ_BYTES = 65_536
# Exit status of ripgrep if it could not read a file or did not accept the pattern.
_FAULT = 2
_POLL_MS = 50
_MANY_PIECES = 16
# A process that uses less than _IDLE_TICKS of processor time in _BLOCKED_S waits for a pipe. Idle threads use a little.
_BLOCKED_S = 0.5
_IDLE_TICKS = 5
_SIGNALS = tuple(number for number in range(1, 65) if number not in (9, 19, 32, 33))


class BlockedError(Exception):
    """Error: the search process waits for a named pipe that has the name of a rule file (such as .gitignore), which
    ripgrep opens.
    """


class Child:
    """A search process (ripgrep). Use it as a context manager: the process has ended when the block ends."""

    def __init__(
        self, start: Callable[[int, int], int], rest_s: float = 0.0, *, opens_rule_files: bool = False
    ) -> None:
        """Start the process.

        `start` receives descriptors for stdout and stderr and returns the process ID. Raises OSError.

        `rest_s`: pause between reads in seconds, after many small pieces of output, because many small reads need too
        much processor time. `opens_rule_files`: the process may wait for a pipe, see BlockedError.
        """
        self._rest_s = rest_s
        self._opens_rule_files = opens_rule_files
        self._out, out = os.pipe()
        self._errors, errors = os.pipe()
        try:
            self._pid: int | None = start(out, errors)
        finally:
            os.close(out)
            os.close(errors)
        offer_to_oom_killer(self._pid)
        self.left_out = LeftOut()
        self.status: int | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        os.close(self._out)
        os.close(self._errors)

    def read(self, is_late: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the output piece by piece until the process ends or `is_late` returns True.

        `is_late` is called between pieces and raises RequestFailure if the call is cancelled. When the pipe is full,
        the process waits until the caller continues to read. Raises BlockedError.
        """
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        poller.register(self._errors, select.POLLIN)
        open_fds, pieces = 2, 0
        ticks, check_at = 0, time.monotonic() + _BLOCKED_S
        while open_fds:
            if is_late():
                self.end()
                return
            ready = poller.poll(_POLL_MS)
            if self._opens_rule_files and time.monotonic() >= check_at:
                before, ticks = ticks, self._read_cpu_ticks()
                if not ready and ticks - before < _IDLE_TICKS and not self._has_work():
                    raise BlockedError
                check_at = time.monotonic() + _BLOCKED_S
            for fd, _ in ready:
                data = os.read(fd, _READ_BYTES)
                if not data:
                    poller.unregister(fd)
                    open_fds -= 1
                    continue
                if fd == self._out:
                    yield data
                else:
                    self.left_out.feed(data)
                pieces += 1
            if pieces > _MANY_PIECES:
                time.sleep(self._rest_s)
        if self._pid is not None:
            pid, self._pid = self._pid, None
            self.status = os.waitpid(pid, 0)[1]

    def read_records(self, separator: bytes, is_late: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the output of `read`, split at `separator`."""
        rest = b""
        for data in self.read(is_late):
            *records, rest = (rest + data).split(separator)
            yield from records
        if rest:
            yield rest

    @property
    def was_late(self) -> bool:
        """Return whether the process was killed at the time limit, or PCRE2 gave up a text that takes too many
        steps.
        """
        return self.status is None or self.left_out.has_given_up

    @property
    def was_cut_off(self) -> bool:
        """Return whether the process has not searched everything: it was killed at the time limit or by a signal,
        lacked memory or threads, or PCRE2 gave up a text that takes too many steps.
        """
        return (
            self.status is None
            or os.waitstatus_to_exitcode(self.status) not in (0, 1, _FAULT)
            or self.left_out.has_given_up
        )

    @property
    def has_refused(self) -> bool:
        """Return whether the process failed with an error that is not about files, and so is about the pattern."""
        is_fault = self.status is not None and os.waitstatus_to_exitcode(self.status) == _FAULT
        return is_fault and not self.left_out.unreadable and not self.was_late

    def find_largest_open(self) -> int:
        """Return the size in bytes of the largest regular file that the process has open."""
        largest, folder = 0, f"/proc/{self._pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    status = os.stat(f"{folder}/{name}")
                    if stat.S_ISREG(status.st_mode):
                        largest = max(largest, status.st_size)
        return largest

    def _read_cpu_ticks(self) -> int:
        """Return the processor time of the process so far, in ticks of the clock."""
        fields = _read_stat(f"/proc/{self._pid}/stat")
        return int(fields[11]) + int(fields[12]) if fields else 0

    def _has_work(self) -> bool:
        """Return whether a thread waits for the processor or for the disk, as on a busy host."""
        folder = f"/proc/{self._pid}/task"
        return any(_read_stat(f"{folder}/{thread}/stat")[:1] in ([b"R"], [b"D"]) for thread in os.listdir(folder))

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            pid, self._pid = self._pid, None
            os.waitpid(pid, 0)


def start_program(argv: list[bytes], inherited: tuple[int, ...] = ()) -> Callable[[int, int], int]:
    """Return a start function for Child that runs a program in the current directory.

    The program inherits the descriptors in `inherited` under the same numbers.
    """

    def start(out: int, errors: int) -> int:
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
        try:
            for fd in inherited:
                os.set_inheritable(fd, True)
            # A new session has no terminal. Reset all signals to their default action, because an ignored signal would
            # stay ignored in the program.
            return os.posix_spawn(
                argv[0], argv, ENVIRONMENT, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_SIGNALS
            )
        finally:
            os.close(null)

    return start


def _read_stat(path: str) -> list[bytes]:
    """Return the fields of a process or thread after its name, or nothing if it has ended."""
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
