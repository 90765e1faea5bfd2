"""The forked process that serves calls, one after the other as long as each leaves nothing behind."""

from __future__ import annotations

import os
import signal

from guest.bench import Bench
from guest.commands.exec_requests import ExecRequest
from guest.commands.execution import Execution
from guest.commands.job_requests import JobStartRequest
from guest.failures import CANCELLED, INTERNAL, TIMEOUT, Failure, describe_os_error
from guest.handover import take
from guest.kernel import PR_SET_CHILD_SUBREAPER, set_process_flag
from guest.pipes import CallPipes, Watch
from guest.process_tree import KillReport, kill_below, reap
from guest.requests import load_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.handover import Assignment
    from guest.pipes import SupervisorEnds
    from guest.places import Places

_UNCLEAN_ENDS = (CANCELLED, INTERNAL, TIMEOUT)


class Supervisor:
    """One supervisor process. `serve` returns when it may serve no more."""

    def __init__(self, ends: SupervisorEnds, places: Places) -> None:
        self._ends = ends
        self._places = places

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

        keep(assignment, self._ends, self._places)

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
            return Execution(request, pipes, self._places, assignment.oom_kills).run()
        return load_server(request)(request, Bench(self._places, pipes, Watch(pipes, request.timeout_s)))


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
