"""The supervisor: a process that PID 1 forks to serve calls, from its fork to its exit."""

from __future__ import annotations

import os
import signal

from guest.call_pipes import Assignment, CallPipes, SupervisorEnds
from guest.commands.exec_request import ExecRequest
from guest.commands.execution import Execution
from guest.commands.job_requests import JobStartRequest
from guest.failures import CANCELLED, INTERNAL, TIMEOUT, RequestFailure, describe_os_error
from guest.fields import printable
from guest.kernel import PR_SET_CHILD_SUBREAPER, set_process_flag
from guest.processes import KillReport, kill_below, reap
from guest.request_context import RequestContext, Watch
from guest.requests import REQUESTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.fields import GuestRequest
    from guest.paths import GuestPaths

_UNCLEAN_ENDS = (CANCELLED, INTERNAL, TIMEOUT)


class Supervisor:
    """A supervisor process, from its fork to its exit."""

    def __init__(self, ends: SupervisorEnds, paths: GuestPaths) -> None:
        self._ends = ends
        self._paths = paths

    def serve(self, first: Assignment) -> None:
        """Serve `first`, which the process inherited at its fork, then the calls that PID 1 sends.

        Return when the process must not serve another call.
        """
        self._leave_pid_1(first)
        assignment: Assignment | None = first
        while assignment is not None and self._serve_call(assignment):
            self._leave_call()
            received = self._ends.receive(REQUESTS)
            assignment = received if isinstance(received, Assignment) else None

    def _leave_pid_1(self, first: Assignment) -> None:
        """Release what belongs to PID 1 and to other calls."""
        # Close the host's channel: a program that inherits it could send answers in place of the guest.
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1):
            # Keep descriptors 0 and 1 open, so that no pipe of a program gets these numbers.
            os.dup2(null, fd, inheritable=False)
        self._ends.close_all_others(first.body)
        # Ignore SIGXFSZ: a write beyond the file size limit must fail with an error and not end this process.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # Become a child subreaper: orphans of the call's programs become children of this process. So no process of the
        # call can escape the kill by a double fork, and `reap` can prove that none is left.
        set_process_flag(PR_SET_CHILD_SUBREAPER, 1)

    def _leave_call(self) -> None:
        """Release every descriptor that the call opened, and leave the working directory of the call."""
        self._ends.close_all_others()
        os.chdir("/")

    def _serve_call(self, assignment: Assignment) -> bool:
        """Serve one call and report its end. Return whether the process can serve another call."""
        # Mark the call as taken before anything is done for it: if this process dies later, PID 1 does not run the call
        # a second time.
        self._ends.progress.take()
        if isinstance(assignment.request, JobStartRequest):
            self._keep_job(assignment)
            return False
        pipes = self._ends.open_call(assignment.body)
        fields = self._run_call(assignment, pipes)
        is_clean = _is_clean(fields)
        self._ends.writer.send_done(fields, is_clean)
        return is_clean

    def _keep_job(self, assignment: Assignment) -> None:
        """Keep a background job until its end. The module is imported only here, so that other supervisors stay
        small.
        """
        from guest.commands.job_keeper import keep

        keep(assignment, self._ends, self._paths)

    def _run_call(self, assignment: Assignment, pipes: CallPipes) -> dict[str, object]:
        try:
            return self._dispatch(assignment, pipes)
        except RequestFailure as failure:
            return _build_failed_end(failure, pipes)
        except OSError as error:
            return _build_failed_end(describe_os_error(error, _name_subject(error)), pipes)
        # The outermost handler of this process: even after a bug in the guest, the call must be answered and no process
        # may be left.
        except Exception as error:  # noqa: BLE001
            return _build_failed_end(RequestFailure(INTERNAL, f"{type(error).__name__} in the guest"), pipes)

    def _dispatch(self, assignment: Assignment, pipes: CallPipes) -> dict[str, object]:
        request = assignment.request
        if isinstance(request, ExecRequest):
            return Execution(request, pipes, self._paths, assignment.oom_kills).run()
        module, function = request.SERVER
        serve: Callable[[GuestRequest, RequestContext], dict[str, object]] = getattr(
            __import__(module, fromlist=(function,)), function
        )
        return serve(request, RequestContext(self._paths, pipes, Watch(pipes, request.timeout_s)))


def _name_subject(error: OSError) -> str:
    """Return the path of the error for a message."""
    return printable(error.filename) if isinstance(error.filename, (bytes, str)) else "the guest"


def _build_failed_end(failure: RequestFailure, pipes: CallPipes) -> dict[str, object]:
    """Return the done fields of a failed call, after every process of the call is killed."""
    fields: dict[str, object] = {"error": failure.as_error()}
    if not reap():
        report = KillReport()
        kill_below(report)
        fields["kill"] = report.as_field()
    pipes.settle()
    return fields


def _is_clean(fields: dict[str, object]) -> bool:
    """Return whether a call ended without a kill.

    Then `reap` has already shown that no child is left.
    """
    error = fields.get("error")
    if fields.get("kill") or fields.get("timed_out") or fields.get("cancelled"):
        return False
    return not (isinstance(error, dict) and error["code"] in _UNCLEAN_ENDS)
