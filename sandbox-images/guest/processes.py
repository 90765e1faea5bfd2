"""The processes of a sandbox: start programs, find the descendants of a process, kill, reap, and count OOM kills.

Invariant: when a call has ended, no process of the call lives. A kill therefore repeats rounds of SIGKILL until a scan
of /proc finds nothing or `wait` reports that no child is left. When processes survive, the report of the kill says so.

The proof relies on child subreapers. A supervisor is a subreaper: the kernel makes the supervisor the parent of all
orphans of its programs. PID 1 receives the orphans of a supervisor that has died.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from guest.failures import INVALID_ARGUMENTS, SPAWN_FAILED, RequestFailure, describe_os_error
from guest.fields import encode_text, printable
from guest.paths import TOOLKIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

KILL_WINDOW_S = 0.5
"""Time limit for all rounds of one kill, in seconds."""
_PAUSE_S = 0.001
QUIET_SCANS = 2
_SIGKILL = 9
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# __WALL: also wait for children that send no SIGCHLD when they end. A plain wait ignores these children.
_WAIT_ALL = 0x40000000
_COUNTERS = (
    b"/sys/fs/cgroup/memory/memory.oom_control",
    b"/sys/fs/cgroup/memory.events",
    b"/sys/fs/cgroup/memory.events.local",
)
_OFFER = b"200"
"""Value for oom_score_adj: a process with it counts as if it used a fifth of the container's memory more, which exceeds
what the guest ever uses.

A program may reset its own value to zero. If the value were larger, the OOM killer would kill all small programs of
other calls before a large program that has reset its value.
"""
_OFFER_ROUNDS = 8
TERM_GRACE_S = 0.25
"""Time for a program to end by itself after its limit, in seconds. The output of this time is still output of the
call.
"""
_SIGTERM = 15
_SIGCONT = 18

MAX_ARGUMENT_BYTES = 131_071
"""Longest argument that the kernel accepts, in bytes, without the final NUL."""
_BASH_PATHS = (b"/bin/bash", b"/usr/bin/bash", b"/usr/local/bin/bash")
BASH = (
    next((path for path in _BASH_PATHS if os.access(path, os.X_OK)), TOOLKIT + b"/bash"),
    b"--norc",
    b"-c",
)
"""Path of bash and its first arguments: the bash of the image, or in an image without bash, that of the toolkit."""
# Above the number of every descriptor that a supervisor opens.
_SPARE_FD = 200

# SIGKILL and SIGSTOP cannot be set. The C library uses 32 and 33 for itself.
_SIGNALS = tuple(number for number in range(1, 65) if number not in (9, 19, 32, 33))


def enter_directory(path: str, workspace: bytes) -> None:
    """Make `path` the working directory of this process. Raises RequestFailure.

    posix_spawn cannot set the working directory of a program, so the program inherits the working directory.
    """
    target = os.path.join(workspace, encode_text(path, "'cwd'"))
    try:
        os.chdir(target)
    except OSError as error:
        raise describe_os_error(error, f"cwd {printable(target)}") from None


def spawn(
    argv: list[bytes], env: dict[bytes, bytes], stdin: int, stdout: int, stderr: int, further: Sequence[int] = ()
) -> int:
    """Start a program in its own session. Return its pid. Raises RequestFailure when the program cannot be started.

    The program gets `stdin`, `stdout` and `stderr` as 0, 1 and 2, and `further` from 3 on. The program gets no other
    descriptor.
    """
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    # Move every descriptor to a free number first and then to its final number: a direct move could overwrite a
    # descriptor that has not been moved yet.
    actions += [(os.POSIX_SPAWN_DUP2, fd, _SPARE_FD + at) for at, fd in enumerate(further)]
    for at in range(len(further)):
        actions += [(os.POSIX_SPAWN_DUP2, _SPARE_FD + at, 3 + at), (os.POSIX_SPAWN_CLOSE, _SPARE_FD + at)]
    program = find_program(argv[0], env.get(b"PATH", b""))
    try:
        return os.posix_spawn(program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_SIGNALS)
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise RequestFailure(INVALID_ARGUMENTS, "arguments and environment are too large together") from None
        reason = os.strerror(error.errno or 0).lower()
        raise RequestFailure(SPAWN_FAILED, f"{printable(argv[0][:200])} could not be started: {reason}") from None


def find_program(name: bytes, search_path: bytes) -> bytes:
    """Return the path of the program `name`. Raises RequestFailure when no directory of PATH has the program."""
    if b"/" in name:
        return name
    for directory in search_path.split(b":"):
        candidate = os.path.join(directory or b".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    if name == os.path.basename(BASH[0]):
        return BASH[0]
    raise RequestFailure(
        SPAWN_FAILED, f"{printable(name[:200])} could not be started: not found in PATH; give its full path"
    )


class Process:
    """A process, from /proc/<pid>/stat. `session`: the pid of the process that began its session.

    `busy`: the process runs, waits for a processor, or waits for a disk. `used_s`: processor time that the process has
    used, in seconds.
    """

    __slots__ = ("alive", "busy", "group", "parent", "pid", "session", "used_s")

    def __init__(
        self, pid: int, parent: int, group: int, alive: bool, busy: bool, used_s: float = 0.0, session: int = 0
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.alive = alive
        self.busy = busy
        self.used_s = used_s
        self.session = session


class KillReport:
    """Result of one kill. `pids` contains each signalled process once, even if several rounds signalled the process.

    `method` is "tree" (descendants were killed), or "all" when PID 1 killed every process. `survivors` is the number of
    living targets in the last scan.
    """

    __slots__ = ("method", "pids", "started_at", "survivors")

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.survivors = 0
        self.method = "tree"
        self.started_at = time.monotonic()

    def as_field(self) -> dict[str, object]:
        """Return the report as the `kill` field of a done event."""
        ms = round((time.monotonic() - self.started_at) * 1000, 3)
        return {"signalled": len(self.pids), "survivors": self.survivors, "method": self.method, "ms": ms}


def read_processes() -> dict[int, Process]:
    """Return every process of the pid namespace, by pid.

    Raises OSError when memory or descriptors run out, so that the result is never silently incomplete.
    """
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = _read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def find_below(roots: Iterable[int], table: dict[int, Process]) -> list[Process]:
    """Return the descendants of the processes `roots`, including zombies, without the roots."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    descendants: list[Process] = []
    pending = list(roots)
    while pending:
        below = children.pop(pending.pop(), [])
        descendants += below
        pending += [process.pid for process in below]
    return descendants


def find_entered(table: dict[int, Process]) -> list[Process]:
    """Return the processes that the host has started in the sandbox, beside PID 1: stream servers."""
    return [process for process in table.values() if process.parent == 0 and process.pid != os.getpid()]


def read_descendants() -> list[Process]:
    """Return the descendants of this process, including zombies. Raises OSError in the cases of `read_processes`."""
    return find_below((os.getpid(),), read_processes())


def kill_processes(targets: list[Process], report: KillReport) -> int:
    """Send SIGKILL to the targets, once. Return the number of targets that were alive."""
    alive = [process for process in targets if process.alive]
    own_group = os.getpgrp()
    # The kernel kills a process group in one step, so a process that forks within its group cannot escape the round.
    # Group 0 belongs to a process outside this pid namespace. A process between its fork and its setsid is still in
    # our own group.
    for group in {process.group for process in alive} - {0, 1, own_group}:
        _kill(-group)
    for process in targets:
        _kill(process.pid)
    report.pids.update(process.pid for process in alive)
    return len(alive)


def reap(on_exit: Callable[[int, int], None] | None = None) -> bool:
    """Collect every dead child without waiting. Call `on_exit` with the pid and the wait status of each.

    Return True when no child is left, living or dead. In a child subreaper this proves that no descendant is left.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | _WAIT_ALL)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        if on_exit is not None:
            on_exit(pid, status)


def kill_below(
    report: KillReport, on_exit: Callable[[int, int], None] | None = None, window_s: float = KILL_WINDOW_S
) -> None:
    """Kill and reap every descendant of this process, which must be a child subreaper.

    `report.survivors` contains the number of processes that still live after `window_s` seconds.
    """
    give_up_at = time.monotonic() + window_s
    quiet = 0
    while True:
        try:
            report.survivors = kill_processes(read_descendants(), report)
        except OSError:
            # A failed scan proves nothing, so at least one process counts as alive.
            report.survivors = max(report.survivors, 1)
        if reap(on_exit):
            report.survivors = 0
            return
        # A scan is not atomic: a process that was not seen yet may fork a process that is not seen either. So the end
        # is proven only by several scans in a row without a living process.
        quiet = quiet + 1 if report.survivors == 0 else 0
        if quiet >= QUIET_SCANS or time.monotonic() >= give_up_at:
            return
        time.sleep(_PAUSE_S)


def _read_process(pid: int) -> Process | None:
    """Return the process, or None when the process has ended. Raises OSError."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # The name in brackets may itself contain brackets and blanks. The fields after its last bracket are plain.
        fields = os.read(fd, 1024).rpartition(b")")[2].split()
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    if len(fields) < 18:
        return None
    # A process whose main thread has ended while other threads run is also shown as a zombie, but it lives.
    alive = fields[0] not in (b"Z", b"X", b"x") or int(fields[17]) > 1
    used_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return Process(pid, int(fields[1]), int(fields[2]), alive, fields[0] in (b"R", b"D"), used_s, int(fields[3]))


def _kill(target: int) -> None:
    # Ignore errors: an ended process needs no kill, and the next scan finds a process that could not be killed and
    # counts it as a survivor.
    try:
        os.kill(target, _SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def read_oom_kills(paths: tuple[bytes, ...] = _COUNTERS) -> int | None:
    """Return the OOM counter from the first file that has one, or None when no file has one."""
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            count = _parse_oom_kills(os.read(fd, 4096))
        except OSError:
            count = None
        finally:
            os.close(fd)
        if count is not None:
            return count
    return None


def offer_to_oom_killer(pid: int) -> None:
    """Mark a program and its descendants, so that the kernel's OOM killer chooses them before the guest.

    A child inherits the mark. On a busy host, the program may start children before its mark is set. These children are
    marked too. Otherwise the OOM killer would spare them and kill the marked programs of other calls.
    """
    marked: set[int] = set()
    unmarked = {pid}
    for _ in range(_OFFER_ROUNDS):
        for unmarked_pid in unmarked:
            _set_offer(unmarked_pid)
        marked |= unmarked
        try:
            # Repeat until a scan finds no new pid: only then no child was missed. A child of a marked process inherits
            # the mark.
            unmarked = {process.pid for process in read_descendants()} - marked
        except OSError:
            return
        if not unmarked:
            return


def _set_offer(pid: int) -> None:
    # The program may have ended. Without the mark, the OOM killer chooses a program by its memory alone.
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _OFFER)
        finally:
            os.close(fd)


def _parse_oom_kills(text: bytes) -> int | None:
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.isdigit():
            return int(value)
    return None


def ask_to_end(group: int, report: KillReport) -> None:
    """Send SIGTERM to a program's process group.

    Every living descendant of this process then counts as signalled, even if it ends by itself.
    """
    with contextlib.suppress(OSError):
        report.pids.update(process.pid for process in read_descendants() if process.alive)
    # A stopped program handles SIGTERM only after SIGCONT.
    for number in (_SIGTERM, _SIGCONT):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            return


def kill_everything() -> None:
    """Send SIGKILL to every process except PID 1. The kernel does so in one step that no fork can escape.

    Raises RuntimeError unless this process is PID 1.
    """
    if os.getpid() != 1:
        # Check this: outside of a separate pid namespace, the kill would end every process of the machine.
        raise RuntimeError("only PID 1 of a sandbox may kill everything")
    try:
        os.kill(-1, _SIGKILL)
    except ProcessLookupError:
        return
