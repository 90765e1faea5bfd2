"""The process that does the searching: started, read as it writes, ended when the time is up. It has no terminal, no
input, no shell.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time

from guest.failures import Failure
from guest.paths import ENVIRONMENT
from guest.processes import offer_to_oom_killer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_READ_BYTES = 65_536
# The exit status of who could not do all: read some file, understand the pattern.
_FAULT = 2
_POLL_MS = 50
_MANY_PIECES = 16
# Room for tens of thousands of names.
_KEPT_BYTES = 4 << 20
_SIGNALS = tuple(number for number in range(1, 65) if number not in (9, 19, 32, 33))
# A name may hold line ends.
_OS_ERROR = re.compile(rb"^(?:rg: )?\./(.*?): [^:\n]*\(os error \d+\)$", re.MULTILINE | re.DOTALL)


class Child:
    """One process. Who has it leaves its `with` block: then it has ended, by itself or not."""

    def __init__(self, start: Callable[[int, int], int], rest_s: float = 0.0) -> None:
        """`start` gets descriptors for stdout and stderr, and returns the process's number. Raises OSError.

        `rest_s`: how long to let its output gather, once it has come in many pieces; each costs more than what is in
        it.
        """
        self._rest_s = rest_s
        self._out, out = os.pipe()
        self._errors, errors = os.pipe()
        try:
            self._pid: int | None = start(out, errors)
        finally:
            os.close(out)
            os.close(errors)
        offer_to_oom_killer(self._pid)
        self._complaints = bytearray()
        self.status: int | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        os.close(self._out)
        os.close(self._errors)

    def read(self, is_late: Callable[[], bool]) -> Iterator[bytes]:
        """What it writes, piece by piece, to its end or until it is late: it is asked between pieces, and raises
        Failure on cancel.

        While the caller does not ask for the next piece the process waits, as soon as the pipe is full.
        """
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        poller.register(self._errors, select.POLLIN)
        open_fds, pieces = 2, 0
        while open_fds:
            if is_late():
                self.end()
                return
            for fd, _ in poller.poll(_POLL_MS):
                data = os.read(fd, _READ_BYTES)
                if not data:
                    poller.unregister(fd)
                    open_fds -= 1
                elif fd == self._out:
                    yield data
                    pieces += 1
                    if pieces > _MANY_PIECES:
                        time.sleep(self._rest_s)
                else:
                    self._complaints += data[: _KEPT_BYTES - len(self._complaints)]
        if self._pid is not None:
            pid, self._pid = self._pid, None
            self.status = os.waitpid(pid, 0)[1]

    def read_records(self, separator: bytes, is_late: Callable[[], bool]) -> Iterator[bytes]:
        """As `read`, cut at `separator`."""
        rest = b""
        for data in self.read(is_late):
            *records, rest = (rest + data).split(separator)
            yield from records
        if rest:
            yield rest

    @property
    def was_late(self) -> bool:
        """Whether it was ended by the clock."""
        return self.status is None

    @property
    def was_cut_off(self) -> bool:
        """Whether it did not come to its end: for the clock, for whoever kills processes, or for want of memory or
        threads.
        """
        return self.status is None or os.waitstatus_to_exitcode(self.status) not in (0, 1, _FAULT)

    @property
    def has_refused(self) -> bool:
        """Whether it ended itself with a complaint that is not about files: then it is about the pattern."""
        return self.status is not None and os.waitstatus_to_exitcode(self.status) == _FAULT and not self.unreadable()

    @property
    def complaint(self) -> str:
        """What it wrote to its stderr, as far as it was kept, without the lines on files that could not be read."""
        return _OS_ERROR.sub(b"", bytes(self._complaints)).decode("utf-8", "replace").strip()

    def unreadable(self) -> list[bytes]:
        """Names of what could not be read."""
        return [found[1] for found in _OS_ERROR.finditer(bytes(self._complaints))]

    def end(self) -> None:
        """Kill it unless it has ended."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            pid, self._pid = self._pid, None
            os.waitpid(pid, 0)


def start_program(argv: list[bytes], inherited: tuple[int, ...] = ()) -> Callable[[int, int], int]:
    """For Child: a program in the directory that this process is in, with these descriptors of ours under their own
    numbers.
    """

    def start(out: int, errors: int) -> int:
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
        try:
            for fd in inherited:
                os.set_inheritable(fd, True)
            return os.posix_spawn(
                argv[0], argv, ENVIRONMENT, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_SIGNALS
            )
        finally:
            os.close(null)

    return start


def start_function(work: Callable[[int, int], None]) -> Callable[[int, int], int]:
    """For Child: a fork that does `work` (stdout, stderr) and nothing else; an exception ends it like a signal would, a
    Failure as a fault.
    """

    def start(out: int, errors: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            work(out, errors)
            os._exit(0)
        except Failure as failure:
            write_all(errors, failure.message.encode("utf-8", "replace"))
            os._exit(_FAULT)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    return start


def write_all(fd: int, data: bytes) -> None:
    """Write all of it to a pipe. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
