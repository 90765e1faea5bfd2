"""PID 1's table of the supervisors: the processes that it forks to serve calls.

Invariant: PID 1 knows the state of every call, even after a program of the sandbox stops or kills the call's
supervisor. Every call gets exactly one done event. A call is given to another supervisor only if its first supervisor
did nothing for the call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from guest.call_pipes import Assignment, Progress, ReportWriter, SupervisorEnds, open_channel
from guest.calls import SupervisorHandle
from guest.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from guest.calls import Call
    from guest.paths import GuestPaths

IDLE_S = 1.0
"""Time that a supervisor waits for its next call, in seconds. A sandbox at rest consists of PID 1 alone."""
TAKE_S = 0.3
"""Time limit for a waiting supervisor to take a call, in seconds. The limit is longer than a scheduling delay on a
busy host, and small compared with the time limit of a call.
"""


class Supervisors:
    """Every supervisor that was forked and not yet reaped.

    Invariant: every pid in the table is an unreaped child of PID 1. The kernel does not reuse the pid of an unreaped
    child. A kill therefore never hits another process.
    """

    def __init__(self, paths: GuestPaths) -> None:
        self._paths = paths
        self._by_pid: dict[int, SupervisorHandle] = {}
        self.by_reports: dict[int, SupervisorHandle] = {}
        # The pids of supervisors that will exit soon and serve no further call.
        self.ending: set[int] = set()
        self._idle: SupervisorHandle | None = None
        self._idle_until = 0.0

    @property
    def pids(self) -> set[int]:
        """Return the pids of all supervisors that are not reaped."""
        return set(self._by_pid)

    @property
    def calls(self) -> list[Call]:
        """Return the calls that supervisors serve now."""
        return [handle.call for handle in self._by_pid.values() if handle.call is not None]

    @property
    def idle_pids(self) -> set[int]:
        """Return the pids of the supervisors that serve no call.

        These are the supervisor that waits for its next call, and supervisors that will exit soon.
        """
        return {
            pid
            for pid, handle in self._by_pid.items()
            if handle is self._idle or (handle.call is None and pid in self.ending)
        }

    @property
    def idle_until(self) -> float | None:
        """Return the time at which the waiting supervisor is ended, or None when no supervisor waits."""
        return self._idle_until if self._idle is not None else None

    def entrust(self, call: Call) -> None:
        """Give a call to the waiting supervisor, or to a new supervisor.

        Raises OSError when no process can be forked.
        """
        # A program of another call may have stopped or killed the waiting supervisor. If it does not take the call
        # within TAKE_S, it is killed, and the call goes to a new supervisor.
        idle, self._idle = self._idle, None
        if idle is not None and idle.give(call):
            call.entrust(idle, TAKE_S)
            return
        if idle is not None:
            self.kill(idle)
        self.entrust_to_new(call)

    def entrust_to_new(self, call: Call) -> None:
        """Fork a supervisor, which inherits the call. Raises OSError."""
        handle = self._fork(call)
        self._by_pid[handle.pid] = handle
        self.by_reports[handle.reports] = handle
        call.entrust(handle, None)

    def entrust_to_keeper(self, call: Call, keeper: SupervisorHandle) -> bool:
        """Send a request about a job to the supervisor that keeps the job.

        Return False when that supervisor has ended.
        """
        if keeper.pid not in self._by_pid or not keeper.give(call):
            return False
        call.entrust(keeper, None)
        return True

    def release(self, handle: SupervisorHandle) -> None:
        """Record that the call of a supervisor is answered. The supervisor then waits for its next call.

        Kill the supervisor instead if another one already waits, or if its call was cancelled or overdue.
        """
        # A cancel that was sent too late is still in the supervisor's channel and would cancel the next call. So a
        # supervisor whose call was cancelled serves no other call.
        call, handle.call = handle.call, None
        if not handle.is_free or handle.pid not in self._by_pid:
            return
        if self._idle is None and call is not None and not call.cancelled and not call.overdue:
            self._idle = handle
            self._idle_until = time.monotonic() + IDLE_S
        else:
            self.kill(handle)

    def retire_idle(self) -> None:
        """Kill the supervisor that waits for its next call.

        The waiting supervisor holds no data, so a kill loses nothing. A kill also ends a supervisor that a program has
        stopped.
        """
        if self._idle is not None:
            self.kill(self._idle)
            self._idle = None

    def kill(self, handle: SupervisorHandle) -> None:
        """Send SIGKILL to a supervisor."""
        os.kill(handle.pid, signal.SIGKILL)
        self.ending.add(handle.pid)

    def end_reports(self, handle: SupervisorHandle) -> None:
        """Record that the report pipe is at its end: the supervisor has exited or exits soon."""
        self.by_reports.pop(handle.reports, None)
        self.ending.add(handle.pid)
        if handle is self._idle:
            self._idle = None

    def take_reaped(self, pid: int) -> SupervisorHandle | None:
        """Remove and return the supervisor with this pid, whose exit was collected. Return None if the pid belongs to
        no supervisor.

        From here on, the kernel may give the pid to another process. The reports in the pipe can still be read.
        """
        return self._by_pid.pop(pid, None)

    def forget(self, handle: SupervisorHandle) -> None:
        """Close a supervisor after its exit was collected and its reports were read."""
        self.by_reports.pop(handle.reports, None)
        self.ending.discard(handle.pid)
        handle.call = None
        if handle is self._idle:
            self._idle = None
        handle.close()

    def _fork(self, call: Call) -> SupervisorHandle:
        """Fork a supervisor. Return PID 1's record of the new process. Raises OSError."""
        with contextlib.ExitStack() as supervisor_channel, contextlib.ExitStack() as own_channel:
            reports, reports_w = os.pipe()
            own_channel.callback(os.close, reports)
            supervisor_channel.callback(os.close, reports_w)
            for fd in (reports, reports_w):
                os.set_blocking(fd, False)
            channel, supervisors_end = open_channel()
            own_channel.callback(channel.close)
            supervisor_channel.callback(supervisors_end.close)
            progress = Progress()
            pid = os.fork()
            if pid == 0:
                # The new process inherits the call, so a header may have any length and no read can fail.
                self._be_supervisor(SupervisorEnds(ReportWriter(reports_w), supervisors_end, progress), call)
            own_channel.pop_all()
        return SupervisorHandle(pid, reports, channel, progress, call)

    def _be_supervisor(self, ends: SupervisorEnds, call: Call) -> NoReturn:
        try:
            Supervisor(ends, self._paths).serve(Assignment(call.request, call.body.fd, call.oom_kills))
        finally:
            # A supervisor must never return into PID 1's loop, even after an exception.
            os._exit(0)
