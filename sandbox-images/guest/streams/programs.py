"""The start of a program of a stream: in a new session, with or without a terminal, also as another user."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import termios

from guest.commands.exec_request import ExecRequest
from guest.commands.execution import build_program
from guest.failures import INVALID_ARGUMENTS, SPAWN_FAILED, RequestFailure, describe_os_error
from guest.fields import encode_text, printable
from guest.processes import find_program
from guest.users import become

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from guest.paths import GuestPaths
    from guest.users import User

# A program of the sandbox may stop the new process before it becomes the program.
_START_S = 10.0
_SPARE_FD = 10
_FAILURE = struct.Struct(">BI")
_OF_FOLDER, _OF_PROGRAM = 0, 1
_NOT_SETTABLE = (signal.SIGKILL, signal.SIGSTOP)
_TERMINAL = {"TERM": "xterm-256color"}


def build_start(
    argv: list[str], variables: dict[str, str], user: User | None, is_terminal: bool, paths: GuestPaths
) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
    """Return the arguments, the environment and the descriptors from 3 on, as for an exec request.

    Raises RequestFailure and OSError.
    """
    of_user = {}
    if user is not None:
        of_user = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell}
    env = {**of_user, **(_TERMINAL if is_terminal else {}), **variables}
    return build_program(ExecRequest.restore({"argv": argv, "env": env}), b"", paths)


def open_terminal(cols: int, rows: int, user: User | None) -> tuple[int, int]:
    """Return the master and the slave of a new terminal. Raises OSError."""
    master, slave = os.openpty()
    try:
        set_terminal_size(master, cols, rows)
        if user is not None:
            os.fchown(slave, user.uid, user.gid)
        os.set_blocking(master, False)
    except OSError:
        os.close(master)
        os.close(slave)
        raise
    return master, slave


def set_terminal_size(master: int, cols: int, rows: int) -> None:
    """Set the size of a terminal. Its programs get SIGWINCH. Raises OSError."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


class Program:
    """A program to start. `stdio`: its descriptors 0, 1 and 2. `further`: those from 3 on."""

    def __init__(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: str, user: User | None, paths: GuestPaths
    ) -> None:
        self._argv = argv
        self._env = env
        self._cwd = os.path.join(paths.workspace, encode_text(cwd, "'cwd'"))
        self._user = user
        self._path = find_program(argv[0], env.get(b"PATH", b""))

    def start(self, stdio: Sequence[int], further: Sequence[int], is_terminal: bool) -> int:
        """Start the program. Return its pid. Raises RequestFailure and OSError.

        posix_spawn cannot change the user or the controlling terminal, so this process forks.
        """
        failures, failures_w = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_program(stdio, further, is_terminal, failures_w)
            os.close(failures_w)
            failures_w = -1
            # The end of the pipe: the program runs.
            if not _is_readable(failures):
                os.kill(pid, signal.SIGKILL)
                raise RequestFailure(SPAWN_FAILED, "the program did not start: a process of the sandbox stopped it")
            self._check(os.read(failures, _FAILURE.size))
        finally:
            os.close(failures)
            if failures_w >= 0:
                os.close(failures_w)
        return pid

    def _become_program(
        self, stdio: Sequence[int], further: Sequence[int], is_terminal: bool, failures: int
    ) -> NoReturn:
        step = _OF_PROGRAM
        try:
            os.setsid()
            if is_terminal:
                fcntl.ioctl(stdio[0], termios.TIOCSCTTY, 0)
            # Move every descriptor to a free number first: a direct move could overwrite one that was not moved yet.
            failures, *moved = [_move(fd) for fd in (failures, *stdio, *further)]
            for number, fd in enumerate(moved):
                os.dup2(fd, number)
            for signal_number in signal.valid_signals() - set(_NOT_SETTABLE):
                signal.signal(signal_number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if self._user is not None:
                become(self._user)
            step = _OF_FOLDER
            os.chdir(self._cwd)
            step = _OF_PROGRAM
            os.execve(self._path, self._argv, self._env)
        except OSError as error:
            os.write(failures, _FAILURE.pack(step, error.errno or 0))
        finally:
            os._exit(127)

    def _check(self, failure: bytes) -> None:
        if not failure:
            return
        step, number = _FAILURE.unpack(failure)
        if step == _OF_FOLDER:
            raise describe_os_error(OSError(number, ""), f"cwd {printable(self._cwd)}")
        if number == errno.E2BIG:
            raise RequestFailure(INVALID_ARGUMENTS, "arguments and environment are too large together")
        name, reason = printable(self._argv[0][:200]), os.strerror(number).lower()
        raise RequestFailure(SPAWN_FAILED, f"{name} could not be started: {reason}")


def _move(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _SPARE_FD)


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(int(_START_S * 1000)))
