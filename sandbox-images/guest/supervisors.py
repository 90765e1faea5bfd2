"""The supervisors: processes that PID 1 forks to serve calls, and PID 1's record of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from guest.commands.execution import Execution
from guest.commands.job_requests import JobStartRequest
from guest.commands.spawn import ExecRequest
from guest.failures import CANCELLED, INTERNAL, TIMEOUT, Failure, describe_os_error
from guest.kernel import PR_SET_CHILD_SUBREAPER, set_process_flag
from guest.processes import KillReport, kill_below, reap
from guest.requests import load_server
from guest.supervisor_channel import (
    DONE_AND_FREE,
    Assignment,
    CallPipes,
    Progress,
    ReportReader,
    ReportWriter,
    RequestContext,
    SupervisorEnds,
    Watch,
    give,
    open_channel,
    send_cancel,
    take,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import NoReturn

    from guest.calls import Call
    from guest.paths import GuestPaths

_UNCLEAN_ENDS = (CANCELLED, INTERNAL, TIMEOUT)
IDLE_S = 1.0
"""How long a supervisor waits for its next call: a sandbox at rest is PID 1 alone."""
TAKE_S = 0.3
"""How long a supervisor that waited may take to take a call: longer than the scheduler of a busy host, and little of a
limit.
"""
_READ_BYTES = 65_536


class Supervisor:
    """One supervisor process. `serve` returns when it may serve no more."""

    def __init__(self, ends: SupervisorEnds, paths: GuestPaths) -> None:
        self._ends = ends
        self._paths = paths

    def serve(self, first: Assignment) -> None:
        """Serve `first`, which was inherited, then what PID 1 hands over."""
        self._leave_pid_1(first)
        assignment: Assignment | None = first
        while assignment is not None and self._serve_call(assignment):
            self._leave_call()
            assignment = take(self._ends.channel)

    def _leave_pid_1(self, first: Assignment) -> None:
        """Let go of what belongs to PID 1 and to other calls."""
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1):
            # The numbers stay taken, so that no pipe of a program lands on them.
            os.dup2(null, fd, inheritable=False)
        self._ends.close_all_others(first.body)
        # Beyond the file size limit a write is to fail, not to end this process.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        set_process_flag(PR_SET_CHILD_SUBREAPER, 1)

    def _leave_call(self) -> None:
        """Let go of all that the call opened, whoever opened it, and of where it worked."""
        self._ends.close_all_others()
        os.chdir("/")

    def _serve_call(self, assignment: Assignment) -> bool:
        """Serve one call and report its end; says whether this process is as it was before."""
        self._ends.progress.take()
        if isinstance(assignment.request, JobStartRequest):
            self._keep_job(assignment)
            return False
        pipes = CallPipes(self._ends, assignment.body)
        fields = self._end_of(assignment, pipes)
        is_clean = _is_clean(fields)
        self._ends.writer.send_done(fields, is_clean)
        return is_clean

    def _keep_job(self, assignment: Assignment) -> None:
        """Only who keeps a job loads what that needs."""
        from guest.commands.job_keeper import keep

        keep(assignment, self._ends, self._paths)

    def _end_of(self, assignment: Assignment, pipes: CallPipes) -> dict[str, object]:
        try:
            return self._fulfil(assignment, pipes)
        except Failure as failure:
            return _end_failed(failure, pipes)
        except OSError as error:
            return _end_failed(describe_os_error(error, "the guest"), pipes)
        # The edge of this process: a bug in it must still answer the call, and leave nothing running.
        except Exception as error:  # noqa: BLE001
            return _end_failed(Failure(INTERNAL, f"{type(error).__name__} in the guest"), pipes)

    def _fulfil(self, assignment: Assignment, pipes: CallPipes) -> dict[str, object]:
        request = assignment.request
        if isinstance(request, ExecRequest):
            return Execution(request, pipes, self._paths, assignment.oom_kills).run()
        return load_server(request)(request, RequestContext(self._paths, pipes, Watch(pipes, request.timeout_s)))


def _end_failed(failure: Failure, pipes: CallPipes) -> dict[str, object]:
    fields: dict[str, object] = {"error": failure.as_error()}
    if not reap():
        report = KillReport()
        kill_below(report)
        fields["kill"] = report.as_field()
    pipes.settle()
    return fields


def _is_clean(fields: dict[str, object]) -> bool:
    """Whether a call ended by itself. Where nothing was killed, `reap` has said that no child is left."""
    error = fields.get("error")
    if fields.get("kill") or fields.get("timed_out") or fields.get("cancelled"):
        return False
    return not (isinstance(error, dict) and error["code"] in _UNCLEAN_ENDS)


class SupervisorHandle:
    """PID 1's hold on one supervisor."""

    __slots__ = ("_channel", "_reader", "call", "is_free", "pid", "progress", "reports")

    def __init__(self, pid: int, reports: int, channel: _socket.socket, progress: Progress, call: Call) -> None:
        self.pid = pid
        self.reports = reports
        self.progress = progress
        self.call: Call | None = call
        # It has said that it waits for its next call.
        self.is_free = False
        self._channel = channel
        self._reader = ReportReader()

    def give(self, call: Call) -> bool:
        """Hand it its next call; False when it cannot be."""
        self.progress.reset()
        if not give(self._channel, call.header, call.body.fd, call.oom_kills):
            return False
        # A program of another call may have stopped it while it waited.
        os.kill(self.pid, signal.SIGCONT)
        self.call = call
        self.is_free = False
        return True

    def cancel(self) -> None:
        send_cancel(self._channel)

    def read_reports(self) -> tuple[list[tuple[int, bytes]], bool]:
        """The records that are complete, and whether anything came: nothing at the end, or from a pipe that is
        empty.
        """
        try:
            data = os.read(self.reports, _READ_BYTES)
        except BlockingIOError:
            return [], False
        records = self._reader.feed(data)
        self.is_free = bool(records) and records[-1][0] == DONE_AND_FREE
        return records, bool(data)

    def close(self) -> None:
        os.close(self.reports)
        self._channel.close()


class Supervisors:
    """Every supervisor that was forked and is not reaped yet. The pid of each is PID 1's own child: a kill meets no
    other.
    """

    def __init__(self, paths: GuestPaths) -> None:
        self._paths = paths
        self._by_pid: dict[int, SupervisorHandle] = {}
        self.by_reports: dict[int, SupervisorHandle] = {}
        # Those whose exit is to come soon.
        self.ending: set[int] = set()
        self._idle: SupervisorHandle | None = None
        self._idle_until = 0.0

    @property
    def pids(self) -> set[int]:
        return set(self._by_pid)

    @property
    def calls(self) -> list[Call]:
        """The calls that are served."""
        return [handle.call for handle in self._by_pid.values() if handle.call is not None]

    @property
    def idle_pids(self) -> set[int]:
        """Of those that serve nothing: the one that waits, and those whose end is on its way."""
        return {
            pid
            for pid, handle in self._by_pid.items()
            if handle is self._idle or (handle.call is None and pid in self.ending)
        }

    @property
    def idle_until(self) -> float | None:
        return self._idle_until if self._idle is not None else None

    def entrust(self, call: Call) -> None:
        """Give a call to the one that waits, or to a new one. Raises OSError when there is no room for a process."""
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
        """Hand a request about a job to the one that keeps it; False when that has left."""
        if keeper.pid not in self._by_pid or not keeper.give(call):
            return False
        call.entrust(keeper, None)
        return True

    def release(self, handle: SupervisorHandle) -> None:
        """Its call is answered: it waits for the next, unless one does already or its call was to be ended."""
        call, handle.call = handle.call, None
        if not handle.is_free or handle.pid not in self._by_pid:
            return
        if self._idle is None and call is not None and not call.cancelled and not call.overdue:
            self._idle = handle
            self._idle_until = time.monotonic() + IDLE_S
        else:
            self.kill(handle)

    def retire_idle(self) -> None:
        """End the one that waits. It holds nothing, so a kill is as good as a word, and meets also one that was
        stopped.
        """
        if self._idle is not None:
            self.kill(self._idle)
            self._idle = None

    def kill(self, handle: SupervisorHandle) -> None:
        os.kill(handle.pid, signal.SIGKILL)
        self.ending.add(handle.pid)

    def end_reports(self, handle: SupervisorHandle) -> None:
        """Its pipe has come to its end: it has exited, or is about to."""
        self.by_reports.pop(handle.reports, None)
        self.ending.add(handle.pid)
        if handle is self._idle:
            self._idle = None

    def take_reaped(self, pid: int) -> SupervisorHandle | None:
        """The supervisor whose exit was collected: from here on its pid may be anybody's. What it said may still be
        read.
        """
        return self._by_pid.pop(pid, None)

    def forget(self, handle: SupervisorHandle) -> None:
        """It is reaped, and its reports are read."""
        self.by_reports.pop(handle.reports, None)
        self.ending.discard(handle.pid)
        handle.call = None
        if handle is self._idle:
            self._idle = None
        handle.close()

    def _fork(self, call: Call) -> SupervisorHandle:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            reports, reports_w = os.pipe()
            ours.callback(os.close, reports)
            theirs.callback(os.close, reports_w)
            for fd in (reports, reports_w):
                os.set_blocking(fd, False)
            channel, supervisors_end = open_channel()
            ours.callback(channel.close)
            theirs.callback(supervisors_end.close)
            progress = Progress()
            pid = os.fork()
            if pid == 0:
                self._be_supervisor(SupervisorEnds(ReportWriter(reports_w), supervisors_end, progress), call)
            ours.pop_all()
        return SupervisorHandle(pid, reports, channel, progress, call)

    def _be_supervisor(self, ends: SupervisorEnds, call: Call) -> NoReturn:
        try:
            Supervisor(ends, self._paths).serve(Assignment(call.request, call.body.fd, call.oom_kills))
        finally:
            # Whatever happened, a supervisor never goes back into PID 1's loop.
            os._exit(0)
