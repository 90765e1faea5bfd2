"""The processes of a sandbox: how programs are started, who lives below whom, how processes are killed and collected,
and what the OOM killer did.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from guest.failures import INVALID_ARGUMENTS, SPAWN_FAILED, Failure, describe_os_error, encode_text, printable
from guest.paths import PROGRAMS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from guest.calls import Call

KILL_WINDOW_S = 0.5
"""How long the rounds of one kill may go on."""
_PAUSE_S = 0.001
_QUIET_SCANS = 2
_SIGKILL = 9
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Also children whose end sends no SIGCHLD, which a plain wait does not see.
_WAIT_ALL = 0x40000000
_COUNTERS = (
    b"/sys/fs/cgroup/memory/memory.oom_control",
    b"/sys/fs/cgroup/memory.events",
    b"/sys/fs/cgroup/memory.events.local",
)
_OFFER = b"200"
"""A fifth of the container's memory: more than the guest ever has. With more, a hog that takes its own offer back, as
it may, would outlive every small program beside it."""
_OFFER_ROUNDS = 8
TERM_GRACE_S = 0.25
"""How long a program may take to end by itself at its limit; what it prints then is still its output."""
_SIGTERM = 15
_SIGCONT = 18

MAX_ARGUMENT_BYTES = 131_071
"""What the kernel takes as one argument, without its NUL."""
BASH = (*PROGRAMS["bash"], b"--noprofile", b"--norc", b"-c")
# Above all that a supervisor has open.
_SPARE_FD = 200

# SIGKILL and SIGSTOP cannot be set; 32 and 33 are the C library's own.
_SIGNALS = tuple(number for number in range(1, 65) if number not in (9, 19, 32, 33))


def build_bash_argv(script: bytes) -> list[bytes]:
    """Raises Failure for a script that no bash could run."""
    if b"\0" in script:
        raise Failure(INVALID_ARGUMENTS, "the script has a NUL byte")
    # The last is the script's own name, $0, in front of what bash complains about.
    return [*BASH, script, b"bash"]


def enter_directory(path: str, workspace: bytes) -> None:
    """Make `path` this process's working directory: posix_spawn has no such step. Raises Failure."""
    target = os.path.join(workspace, encode_text(path, "'cwd'"))
    try:
        os.chdir(target)
    except OSError as error:
        raise describe_os_error(error, f"cwd {printable(target)}") from None


def spawn(
    argv: list[bytes], env: dict[bytes, bytes], stdin: int, stdout: int, stderr: int, further: Sequence[int] = ()
) -> int:
    """Start a program in a session of its own, with these descriptors and no other. Raises Failure."""
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    # First out of the way of each other, and last: until here a number may be one of the others'.
    actions += [(os.POSIX_SPAWN_DUP2, fd, _SPARE_FD + at) for at, fd in enumerate(further)]
    for at in range(len(further)):
        actions += [(os.POSIX_SPAWN_DUP2, _SPARE_FD + at, 3 + at), (os.POSIX_SPAWN_CLOSE, _SPARE_FD + at)]
    program = _find_program(argv[0], env.get(b"PATH", b""))
    try:
        return os.posix_spawn(program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_SIGNALS)
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise Failure(INVALID_ARGUMENTS, "arguments and environment are too large together") from None
        if program == BASH[0] and error.errno == errno.ENOENT:
            # The same path for every shell of the session: when it is not there, the image has none.
            message = (
                "the image of this sandbox has no /bin/bash, so no command can run; the file and search tools work "
                "without it"
            )
            raise Failure(SPAWN_FAILED, message) from None
        reason = os.strerror(error.errno or 0).lower()
        raise Failure(SPAWN_FAILED, f"{printable(argv[0][:200])} could not be started: {reason}") from None


def _find_program(name: bytes, search_path: bytes) -> bytes:
    if b"/" in name:
        return name
    for directory in search_path.split(b":"):
        candidate = os.path.join(directory or b".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise Failure(SPAWN_FAILED, f"{printable(name[:200])} could not be started: not found in PATH")


class Process:
    """A line of /proc/<pid>/stat. `busy`: it runs, waits for a processor, or for its disk. `used_s`: seconds of
    processor time that it has had.
    """

    __slots__ = ("alive", "busy", "group", "parent", "pid", "used_s")

    def __init__(self, pid: int, parent: int, group: int, alive: bool, busy: bool, used_s: float = 0.0) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.alive = alive
        self.busy = busy
        self.used_s = used_s


class KillReport:
    """What a kill did. `signalled` counts processes once, however many rounds they took."""

    __slots__ = ("method", "pids", "started_at", "survivors")

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.survivors = 0
        self.method = "tree"
        self.started_at = time.monotonic()

    def as_field(self) -> dict[str, object]:
        ms = round((time.monotonic() - self.started_at) * 1000, 3)
        return {"signalled": len(self.pids), "survivors": self.survivors, "method": self.method, "ms": ms}


def read_processes() -> dict[int, Process]:
    """Return every process of the pid namespace, by pid. Raises OSError when memory or descriptors run out: a table
    that lacks a living process must not look complete.
    """
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = _read_process(int(name))
            if process is not None:
                table[process.pid] = process
    return table


def find_below(roots: Iterable[int], table: dict[int, Process]) -> list[Process]:
    """The processes below `roots`, without the roots, dead ones included."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = list(roots)
    while pending:
        below = children.pop(pending.pop(), [])
        found += below
        pending += [process.pid for process in below]
    return found


def read_descendants() -> list[Process]:
    """Return the processes below this one, dead ones included. Raises OSError as `read_processes` does."""
    return find_below((os.getpid(),), read_processes())


def kill_processes(targets: list[Process], report: KillReport) -> int:
    """One round of SIGKILL; says how many of the targets were alive."""
    alive = [process for process in targets if process.alive]
    own_group = os.getpgrp()
    # The kernel kills a process group in one step, so what forks within its group cannot outrun the round. Group 0 is
    # one outside this pid namespace, and our own is the moment between a fork and its setsid.
    for group in {process.group for process in alive} - {0, 1, own_group}:
        _kill(-group)
    for process in targets:
        _kill(process.pid)
    report.pids.update(process.pid for process in alive)
    return len(alive)


def reap(on_exit: Callable[[int, int], None] | None = None) -> bool:
    """Collect every dead child without waiting; tells `on_exit` its pid and wait status. True: no child is left at all.

    Below a child subreaper that proves that nothing is left of the whole tree.
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
    """Kill and reap everything below this process, a child subreaper; `report.survivors` says what could not be."""
    give_up_at = time.monotonic() + window_s
    quiet = 0
    while True:
        try:
            report.survivors = kill_processes(read_descendants(), report)
        except OSError:
            # What lives is unknown until a scan succeeds.
            report.survivors = max(report.survivors, 1)
        if reap(on_exit):
            report.survivors = 0
            return
        quiet = quiet + 1 if report.survivors == 0 else 0
        if quiet >= _QUIET_SCANS or time.monotonic() >= give_up_at:
            return
        time.sleep(_PAUSE_S)


def _read_process(pid: int) -> Process | None:
    """Return None for a process that has ended. Raises OSError."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # The name in brackets may itself hold brackets and blanks; what follows its last one is plain.
        fields = os.read(fd, 1024).rpartition(b")")[2].split()
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    if len(fields) < 18:
        return None
    # A main thread that ended while others run on is shown as a zombie, too.
    alive = fields[0] not in (b"Z", b"X", b"x") or int(fields[17]) > 1
    used_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return Process(pid, int(fields[1]), int(fields[2]), alive, fields[0] in (b"R", b"D"), used_s)


def _kill(target: int) -> None:
    # Gone already is what was wanted; not permitted is found by the next scan, which counts it as a survivor.
    try:
        os.kill(target, _SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def read_oom_kills(paths: tuple[bytes, ...] = _COUNTERS) -> int | None:
    """The counter in the first of the files that has one, None where there is none."""
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
    """Mark a program and everything it started, so that the OOM killer chooses them before the guest.

    A child inherits the mark. On a busy host the program may have started children before its mark was set: those are
    marked too, or the OOM killer would spare them and kill the marked programs of other calls.
    """
    marked: set[int] = set()
    unmarked = {pid}
    for _ in range(_OFFER_ROUNDS):
        for each in unmarked:
            _set_offer(each)
        marked |= unmarked
        try:
            unmarked = {process.pid for process in read_descendants()} - marked
        except OSError:
            return
        if not unmarked:
            return


def _set_offer(pid: int) -> None:
    # The program may have ended; without the mark it is only not preferred.
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
    """SIGTERM to a program's process group; who lives below us then counts as signalled, however it ends."""
    with contextlib.suppress(OSError):
        report.pids.update(process.pid for process in read_descendants() if process.alive)
    for number in (_SIGTERM, _SIGCONT):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            return


def kill_everything() -> None:
    """SIGKILL to every process but PID 1, in one step of the kernel that no fork outruns."""
    if os.getpid() != 1:
        # Anywhere but in a pid namespace of its own this would end the machine's processes.
        raise RuntimeError("only PID 1 of a sandbox may kill everything")
    try:
        os.kill(-1, _SIGKILL)
    except ProcessLookupError:
        return


def _kill_orphans(supervisors: Set[int], report: KillReport) -> int:
    """One round of SIGKILL for PID 1's children that are no supervisors, and all below them. Raises OSError."""
    table = read_processes()
    me = os.getpid()
    roots = [process for process in table.values() if process.parent == me and process.pid not in supervisors]
    return kill_processes(roots + find_below([process.pid for process in roots], table), report)


class Cleanup:
    """The orphans of calls whose process has ended; the calls' done events wait for it.

    One `step` is one scan and one round, so that PID 1 serves the other calls in between.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Call | None, KillReport]] = []
        self._quiet = 0
        self._give_up_at = 0.0

    @property
    def is_active(self) -> bool:
        return bool(self._held)

    def hold(self, call: Call | None) -> None:
        """None: nobody waits for the end of it, as of what a background job has left."""
        self._held.append((call, KillReport()))
        self._give_up_at = time.monotonic() + KILL_WINDOW_S
        self._quiet = 0

    def step(self, supervisors: Set[int], others_run: bool) -> None:
        """One round against every process that is not below one of PID 1's living `supervisors`."""
        round_report = KillReport()
        try:
            alive = _kill_orphans(supervisors, round_report)
        except OSError:
            # What lives is unknown until a scan succeeds.
            alive = 1
        method = "tree"
        if alive and not others_run:
            kill_everything()
            method = "all"
        self._quiet = 0 if alive else self._quiet + 1
        for _, report in self._held:
            report.pids |= round_report.pids
            report.survivors = alive
            report.method = "all" if "all" in (method, report.method) else "tree"

    def take_finished(self, no_child_left: bool) -> list[tuple[Call | None, KillReport]]:
        """The held calls, once nothing of theirs is left or the window is over."""
        if no_child_left:
            for _, report in self._held:
                report.survivors = 0
        if not (no_child_left or self._quiet >= _QUIET_SCANS or time.monotonic() >= self._give_up_at):
            return []
        finished, self._held = self._held, []
        return finished


def merge_kills(reported: object, report: KillReport) -> dict[str, object]:
    """A supervisor's kill report and what PID 1 added to it."""
    merged = report.as_field()
    if isinstance(reported, dict):
        merged["signalled"] = reported["signalled"] + len(report.pids)
        merged["ms"] = reported["ms"] + merged["ms"]
    return merged
