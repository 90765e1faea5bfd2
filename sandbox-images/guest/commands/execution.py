"""The execution of one program: start the program, watch it, and end it with everything that it started.

Invariant: when the done event is sent, no process of the call lives, or the kill report counts those that survived.
"""

from __future__ import annotations

import os
import select
import time

from guest.commands.outputs import Outputs
from guest.commands.scripts import build_script_start, hide_script
from guest.commands.shell_state import ShellSession
from guest.failures import INVALID_ARGUMENTS, RequestFailure
from guest.fields import encode_text
from guest.paths import TOOLKIT
from guest.processes import (
    MAX_ARGUMENT_BYTES,
    TERM_GRACE_S,
    KillReport,
    ask_to_end,
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
    from guest.call_pipes import CallPipes
    from guest.commands.exec_request import ExecRequest
    from guest.paths import GuestPaths

LEFTOVER_GRACE_S = 0.02
"""Time for the processes that a program left behind to end by themselves, in seconds. Helpers usually end right after
their parent.
"""
BUSY_GRACE_S = 0.5
"""Longer grace for leftover processes that are busy and hold output of the call, in seconds of processor time.

On a busy host, a helper may not have run at all within LEFTOVER_GRACE_S.
"""
BUSY_LIMIT_S = 2.0
"""Longest duration of the grace for busy leftover processes, in seconds of real time."""
# Orphans of a long program are reaped at this interval. As zombies they would count against the limit of processes.
_REAP_PACE_S = 0.1
_NO_PIDFD_PACE_S = 0.005


class Execution:
    """The execution of an exec request. The process that runs it is a child subreaper: orphans of the program become
    its children. The supervisor closes all descriptors that the execution opens.
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
        """Run the program to its end. Return the fields of the done event.

        At the return, no process of the program lives and its output is sent. Raises RequestFailure or OSError when the
        program cannot be started.
        """
        self._start()
        self._watch()
        run_s = time.monotonic() - self._started_at
        self._end_tree()
        # From here on, the call only waits until the host has read its output. Tell PID 1 so (`settle`), or PID 1 would
        # kill this supervisor at the limit, and the output would be lost.
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
        """Start the program. Raises RequestFailure or OSError."""
        script = self._pipes.read_body(self._request.script_bytes)
        if self._request.has_state:
            self._session = ShellSession(self._request, self._paths)
            argv, env, inherited = self._session.prepare(script)
        else:
            argv, env, inherited = build_program(self._request, script, self._paths)
            enter_directory(str(self._request.cwd), self._paths.workspace)
        self._outputs = Outputs(self._request, self._pipes.writer, self._paths)
        stdin = self._pipes.open_stdin(self._request.script_bytes)
        self._started_at = time.monotonic()
        self._limit_at = self._started_at + self._request.timeout_s
        self._pid = spawn(argv, env, stdin, self._outputs.stdout, self._outputs.stderr, inherited)
        offer_to_oom_killer(self._pid)
        # Close the write ends in this process, or the pipes would never reach their end.
        self._outputs.close_write_ends()

    def _watch(self) -> None:
        """Wait until the program exits, the limit is reached, or the call is cancelled."""
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
        """Wait at most `wait_s` seconds, and read output that arrives. Return the ready descriptors."""
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
        """Return a descriptor that becomes readable when the program exits, or None when there is none."""
        try:
            return os.pidfd_open(self._pid)
        except (AttributeError, OSError):
            # Without a pidfd, look for the program's exit at short intervals.
            return None

    def _on_exit(self, pid: int, status: int) -> None:
        if pid == self._pid:
            self._status = status

    def _end_tree(self) -> None:
        """Wait a short time for the processes of the call to end by themselves, and kill the rest."""
        is_over = not (self._timed_out or self._cancelled)
        # The program has ended, but its background children may still write output. Give them a short time and then
        # kill them, so that no process outlives the call.
        if is_over and self._wait_for_busy_processes():
            return
        self._kill = KillReport()
        if not is_over:
            ask_to_end(self._pid, self._kill)
            self._wait_for_processes(TERM_GRACE_S)
        kill_below(self._kill, self._on_exit)

    def _wait_for_busy_processes(self) -> bool:
        """Wait for the processes that the program left behind and that are busy. Return whether all have ended by
        themselves.
        """
        give_up_at, used_before = min(time.monotonic() + BUSY_LIMIT_S, self._limit_at), None
        while not self._wait_for_processes(LEFTOVER_GRACE_S):
            try:
                processes = read_descendants()
            except OSError:
                return False
            used_s = sum(process.used_s for process in processes)
            used_before = used_s if used_before is None else used_before
            # When no process holds an output pipe, no more output can arrive.
            is_useful = self._outputs.open_fds and any(process.busy for process in processes)
            if not is_useful or used_s - used_before >= BUSY_GRACE_S or time.monotonic() >= give_up_at:
                return False
        return True

    def _wait_for_processes(self, grace_s: float) -> bool:
        """Wait up to `grace_s` seconds. Return whether no process of the program lives. Read output while waiting."""
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


def build_program(
    request: ExecRequest, script: bytes, paths: GuestPaths
) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
    """Return the arguments, the environment and the descriptors from 3 on of the program.

    Raises RequestFailure when an argument is too long, and OSError.
    """
    environment = build_environment(request, paths)
    if request.argv is None:
        return build_script_start(script, environment)
    if request.argv[0].startswith(os.fsdecode(TOOLKIT)):
        # Libraries of the image that its programs load first are made for another C library.
        environment = {name: value for name, value in environment.items() if not name.startswith(b"LD_")}
    argv, environment, inherited = hide_script(
        [encode_text(argument, "an argument") for argument in request.argv], environment
    )
    longest = max(len(argument) for argument in argv)
    if longest > MAX_ARGUMENT_BYTES:
        raise RequestFailure(
            INVALID_ARGUMENTS, f"an argument has {longest} bytes, more than {MAX_ARGUMENT_BYTES}: write it to a file"
        )
    return argv, environment, inherited


def build_environment(request: ExecRequest, paths: GuestPaths) -> dict[bytes, bytes]:
    """Return the environment of the program: the variables of the sandbox and of the request. Raises RequestFailure."""
    merged = {**paths.environment, **request.env}
    return {encode_text(name, "env"): encode_text(value, "env") for name, value in merged.items()}
