"""One program under its supervisor: started, watched, ended with all that it started, and told about."""

from __future__ import annotations

import os
import select
import time

from guest.commands.outputs import Outputs
from guest.commands.shell_state import ShellSession
from guest.failures import INVALID_ARGUMENTS, Failure, encode_text
from guest.processes import (
    MAX_ARGUMENT_BYTES,
    TERM_GRACE_S,
    KillReport,
    ask_to_end,
    build_bash_argv,
    enter_directory,
    kill_below,
    offer_to_oom_killer,
    read_descendants,
    read_oom_kills,
    reap,
    spawn,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths
    from guest.requests import ExecRequest
    from guest.supervisors import CallPipes

LEFTOVER_GRACE_S = 0.02
"""What a program that ended left behind may take to end by itself: helpers that follow their parent do."""
BUSY_GRACE_S = 0.5
"""The same while any of it is at work or waits for a processor and holds output of the call, in seconds of processor
time: on a busy host a helper may not have begun after LEFTOVER_GRACE_S."""
BUSY_LIMIT_S = 2.0
"""The longest that that is on a clock."""
# Orphans of a long program are reaped at this pace: as zombies they would count against the limit of processes.
_REAP_PACE_S = 0.1
_NO_PIDFD_PACE_S = 0.005


class Execution:
    """One exec call, in a process that is a child subreaper. What it opens its supervisor closes.

    `run` returns the fields of its done event, once nothing of it lives and its output is sent.
    """

    def __init__(self, request: ExecRequest, pipes: CallPipes, paths: GuestPaths, oom_kills: int | None) -> None:
        self._request = request
        self._pipes = pipes
        self._paths = paths
        self._oom_kills = oom_kills
        self._status: int | None = None
        self._timed_out = False
        self._cancelled = False
        self._kill: KillReport | None = None
        self._session: ShellSession | None = None

    def run(self) -> dict[str, object]:
        """Raises Failure or OSError when the program could not be started."""
        self._start()
        self._watch()
        run_s = time.monotonic() - self._started_at
        self._end_tree()
        self._pipes.settle()
        self._outputs.drain()
        self._outputs.send()
        exit_fields = self._exit_fields()
        return {
            **exit_fields,
            **self._outputs.extras(),
            **self._state_fields(exit_fields["exit_code"] is not None),
            "timed_out": self._timed_out,
            "cancelled": self._cancelled,
            "oom": read_oom_kills() != self._oom_kills,
            "run_s": round(run_s, 6),
            "streams": self._outputs.sizes(),
            "kill": self._kill.as_field() if self._kill else None,
        }

    def _start(self) -> None:
        script = self._pipes.read_body(self._request.script_bytes)
        further: list[int] = []
        if self._request.has_state:
            self._session = ShellSession(self._request, self._paths)
            argv, env, further = self._session.prepare(script)
        else:
            argv, env = build_argv(self._request, script), build_environment(self._request, self._paths)
            enter_directory(str(self._request.cwd), self._paths.workspace)
        self._outputs = Outputs(self._request, self._pipes.writer, self._paths)
        stdin = self._pipes.open_stdin(self._request.script_bytes)
        self._started_at = time.monotonic()
        self._limit_at = self._started_at + self._request.timeout_s
        self._pid = spawn(argv, env, stdin, self._outputs.stdout, self._outputs.stderr, further)
        offer_to_oom_killer(self._pid)
        self._outputs.close_write_ends()

    def _watch(self) -> None:
        """Returns at the program's exit, at the limit, or when the call is cancelled."""
        pidfd = self._open_pidfd()
        pace = _REAP_PACE_S if pidfd is not None else _NO_PIDFD_PACE_S
        reap_at = self._started_at + pace
        while self._status is None:
            now = time.monotonic()
            if now >= self._limit_at:
                self._timed_out = True
                return
            ready = self._wait_for_events(pidfd, min(self._limit_at, reap_at, self._outputs.due_at or reap_at) - now)
            if self._pipes.control in ready:
                self._cancelled = True
                return
            if pidfd in ready or time.monotonic() >= reap_at:
                reap(self._on_exit)
                reap_at = time.monotonic() + pace

    def _wait_for_events(self, pidfd: int | None, wait_s: float) -> set[int]:
        """Wait, and read what has come on the output pipes."""
        self._outputs.pause()
        poller = select.poll()
        outputs = self._outputs.readable_fds()
        for fd in (self._pipes.control, *outputs):
            poller.register(fd, select.POLLIN)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        if self._pipes.writer.is_full:
            poller.register(self._pipes.writer.fd, select.POLLOUT)
        ready = {fd for fd, _ in poller.poll(max(0, int(wait_s * 1000) + 1))}
        if self._pipes.writer.fd in ready:
            self._pipes.writer.flush()
        for fd in ready.intersection(outputs):
            self._outputs.read(fd)
        self._outputs.flush_live()
        return ready

    def _open_pidfd(self) -> int | None:
        try:
            return os.pidfd_open(self._pid)
        except (AttributeError, OSError):
            # Without it the program's end is looked for at a short pace.
            return None

    def _on_exit(self, pid: int, status: int) -> None:
        if pid == self._pid:
            self._status = status

    def _end_tree(self) -> None:
        is_over = not (self._timed_out or self._cancelled)
        if is_over and self._helpers_end():
            return
        self._kill = KillReport()
        if not is_over:
            ask_to_end(self._pid, self._kill)
            self._leftovers_end(TERM_GRACE_S)
        kill_below(self._kill, self._on_exit)

    def _helpers_end(self) -> bool:
        """Whether nothing of a program that has ended lives, after what its helpers may take."""
        give_up_at, used_before = min(time.monotonic() + BUSY_LIMIT_S, self._limit_at), None
        while not self._leftovers_end(LEFTOVER_GRACE_S):
            try:
                left = read_descendants()
            except OSError:
                return False
            used_s = sum(process.used_s for process in left)
            used_before = used_s if used_before is None else used_before
            # Without a pipe that one of them holds nothing more can come.
            is_worth_it = self._outputs.open_fds and any(process.busy for process in left)
            if not is_worth_it or used_s - used_before >= BUSY_GRACE_S or time.monotonic() >= give_up_at:
                return False
        return True

    def _leftovers_end(self, grace_s: float) -> bool:
        """Whether nothing of the program lives, perhaps after the grace. Its output is read on meanwhile."""
        give_up_at = time.monotonic() + grace_s
        while not reap(self._on_exit):
            if time.monotonic() >= give_up_at:
                return False
            self._wait_for_events(None, 0.001)
        return True

    def _state_fields(self, ended_by_itself: bool) -> dict[str, object]:
        if self._session is None:
            return {}
        return self._session.finish(ended_by_itself and not (self._timed_out or self._cancelled))

    def _exit_fields(self) -> dict[str, int | None]:
        if self._status is None:
            return {"exit_code": None, "signal": None}
        code = os.waitstatus_to_exitcode(self._status)
        return {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}


def build_argv(request: ExecRequest, script: bytes) -> list[bytes]:
    if request.argv is None:
        if len(script) > MAX_ARGUMENT_BYTES:
            raise Failure(
                INVALID_ARGUMENTS,
                f"the script has {len(script)} bytes, more than {MAX_ARGUMENT_BYTES}: write it to a file and run the "
                "file",
            )
        return build_bash_argv(script)
    argv = [encode_text(part, "an argument") for part in request.argv]
    longest = max(len(part) for part in argv)
    if longest > MAX_ARGUMENT_BYTES:
        raise Failure(INVALID_ARGUMENTS, f"an argument has {longest} bytes, more than {MAX_ARGUMENT_BYTES}")
    return argv


def build_environment(request: ExecRequest, paths: GuestPaths) -> dict[bytes, bytes]:
    merged = {**paths.environment, **request.env}
    return {encode_text(name, "env"): encode_text(value, "env") for name, value in merged.items()}
