"""The job keeper: a supervisor process that serves one background job from its start to its end.

Invariant: while the keeper lives, every process of the job is below the keeper, which is a child subreaper. The keeper
reports the end of a job after the last process was reaped, or after a kill. It ends when a request has received the end
of the job, or after LINGER_S seconds.
"""

from __future__ import annotations

import os
import select
import time

from guest.commands.job_log import JobLog
from guest.commands.job_requests import (
    EXITED,
    JOB_REQUESTS,
    KILLED,
    RUNNING,
    JobInputRequest,
    JobKillRequest,
    JobPollRequest,
    JobStartRequest,
)
from guest.commands.shell_state import build_shell, enter_session_folder, load_state
from guest.failures import INVALID_ARGUMENTS, RequestFailure, describe_os_error
from guest.kernel import WRITE_LATER
from guest.processes import KillReport, ask_to_end, kill_below, offer_to_oom_killer, read_oom_kills, reap, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.call_pipes import Assignment, SupervisorEnds
    from guest.paths import GuestPaths

GRACE_S = 2.0
"""Time for a job to end by itself after a kill request, in seconds."""
PENDING_INPUT_BYTES = 1_048_576
"""Limit of the input that the job has not read yet, in bytes."""
LINGER_S = 300.0
"""Seconds that the keeper waits for a request after the job's end, to report the end and the unread output."""
_READ_BYTES = 262_144
_REAP_PACE_S = 0.25
_LAST_READS_S = 0.25


class JobKeeper:
    """A background job: its processes, its pipes, its log, and its state."""

    def __init__(self, request: JobStartRequest, ends: SupervisorEnds, body: int | None, paths: GuestPaths) -> None:
        self._request = request
        self._ends = ends
        self._pipes = ends.open_call(body)
        self._paths = paths
        self._status: int | None = None
        self._state = RUNNING
        self._reported_bytes = 0
        self._input = bytearray()
        self._closes_input = False
        self._has_reported_end = False
        self._oom_kills = read_oom_kills()

    def serve(self) -> None:
        """Start the job and serve its requests. Return when a request has received the end of the job, or LINGER_S has
        passed.

        Raises RequestFailure and OSError when the job cannot be started. No process of the job runs then.
        """
        self._start()
        self._watch(time.monotonic() + self._request.wait_ms / 1000, is_start=True)
        self._answer(self._report_output(self._request.max_bytes))
        while not (self._has_reported_end and self._state != RUNNING):
            if not self._watch(None):
                return

    def _start(self) -> None:
        """Start the job's shell. Raises RequestFailure and OSError."""
        script = self._pipes.read_body(self._request.script_bytes)
        argv, env, inherited = build_shell(script, load_state(self._paths), self._paths, token=None)
        enter_session_folder(self._request.cwd, self._paths)
        self._log = JobLog(self._paths, self._request.job)
        stdin, self._stdin = os.pipe()
        self._output, output = os.pipe()
        for fd in (self._stdin, self._output):
            os.set_blocking(fd, False)
        self._started_at = time.monotonic()
        self._pid = spawn(argv, env, stdin, output, output, inherited)
        offer_to_oom_killer(self._pid)
        for fd in (stdin, output, *inherited):
            os.close(fd)

    def _watch(self, until: float | None, is_start: bool = False) -> bool:
        """Watch the job until the time `until`, or until the job ends. With `until` None, return after each answered
        request too.

        `is_start`: the start request is not answered yet, so a cancel kills the job. Return False when the keeper must
        end.
        """
        while self._state == RUNNING or until is None:
            now = time.monotonic()
            if until is not None and now >= until:
                return True
            if self._state != RUNNING and now >= self._ended_at + LINGER_S:
                return False
            pace_s = _REAP_PACE_S if self._state == RUNNING else LINGER_S
            # Wait only a short time while the job runs: an exit without output does not wake the poll, and zombies
            # count against the limit of processes.
            if self._serve_events(min(pace_s, until - now) if until is not None else pace_s):
                received = self._ends.receive(JOB_REQUESTS)
                if received is None:
                    return False
                if not isinstance(received, str):
                    self._serve(received)
                    return True
                if is_start:
                    self._kill()
        return True

    def _serve_events(self, wait_s: float) -> bool:
        """Handle the poll's events: read the job's output, write its input, and reap its processes. Return whether PID
        1 has sent a message.
        """
        poller = select.poll()
        channel = self._ends.channel.fileno()
        poller.register(channel, select.POLLIN)
        if self._output >= 0:
            poller.register(self._output, select.POLLIN)
        if self._input:
            poller.register(self._stdin, select.POLLOUT)
        ready = {fd for fd, _ in poller.poll(int(wait_s * 1000) + 1)}
        if self._output in ready:
            self._read_output()
        if self._stdin in ready:
            self._feed()
        # The job ends when its last process ends, not when its shell ends. A daemon of the job is still part of the
        # job.
        if self._state == RUNNING and reap(self._on_exit):
            self._end(EXITED)
        return channel in ready

    def _on_exit(self, pid: int, status: int) -> None:
        if pid == self._pid:
            self._status = status

    def _read_output(self) -> bool:
        """Read one piece of output into the log. Return False when there is none. At the end of the pipe, close it."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(self._output)
            self._output = -1
            return False
        self._log.add(data)
        return True

    def _end(self, state: str) -> None:
        """Record the end of the job, after its processes were reaped or killed. Read the rest of its output first."""
        # What is still in the pipe is the last output of the job. Limit the time, because a process that survived the
        # kill may keep writing.
        give_up_at = time.monotonic() + _LAST_READS_S
        while self._output >= 0 and time.monotonic() < give_up_at and self._read_output():
            pass
        self._state = state
        self._ended_at = time.monotonic()
        self._ends.writer.send_facts(self._build_state())

    def _serve(self, assignment: Assignment) -> None:
        """Answer one request about the job."""
        # Mark the request as taken: if this keeper dies from here on, it may already have killed the job or written
        # input, so PID 1 must not send the request again.
        self._ends.progress.take()
        self._pipes = self._ends.open_call(assignment.body)
        request = assignment.request
        try:
            if isinstance(request, JobInputRequest):
                self._add_input(request)
                self._answer({"job": self._build_state(), "pending": len(self._input)})
            elif isinstance(request, JobKillRequest):
                report = self._kill()
                fields = self._report_output(request.max_bytes)
                self._answer({**fields, "kill": report.as_field() if report is not None else None})
            elif isinstance(request, JobPollRequest):
                self._answer(self._report_output(request.max_bytes))
        except RequestFailure as failure:
            self._answer({"error": failure.as_error()})
        except OSError as error:
            self._answer({"error": describe_os_error(error, "the job").as_error()})
        finally:
            if assignment.body is not None:
                os.close(assignment.body)

    def _answer(self, fields: dict[str, object]) -> None:
        """Send the done fields of the current request."""
        self._ends.progress.settle()
        self._has_reported_end = self._has_reported_end or (self._state != RUNNING and "streams" in fields)
        self._ends.writer.send_done(fields, is_free=False)

    def _report_output(self, max_bytes: int) -> dict[str, object]:
        """Send at most `max_bytes` bytes of the output since the last request. Return the done fields."""
        while (
            self._output >= 0
            and self._state == RUNNING
            and self._log.written - self._reported_bytes < max_bytes
            and self._read_output()
        ):
            pass
        head, tail = self._log.read(self._reported_bytes, max_bytes)
        total = self._log.written - self._reported_bytes
        self._reported_bytes = self._log.written
        self._ends.writer.send("merged", head)
        self._ends.writer.send("merged", tail)
        return {
            "job": self._build_state(),
            "streams": {"merged": {"total": total, "head": len(head), "tail": len(tail)}},
        }

    def _build_state(self) -> dict[str, object]:
        """Return the state of the job as a field of a done event."""
        code = os.waitstatus_to_exitcode(self._status) if self._status is not None else None
        return {
            "job": self._request.job,
            "label": self._request.label,
            "state": self._state,
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "oom": read_oom_kills() != self._oom_kills,
            "age_s": round(time.monotonic() - self._started_at, 3),
            "log": self._log.path,
            "unread": self._log.written - self._reported_bytes,
            "dropped": self._log.dropped,
        }

    def _add_input(self, request: JobInputRequest) -> None:
        """Add the body of a request to the job's input. Raises RequestFailure when the job cannot read the input."""
        if self._state != RUNNING:
            raise RequestFailure(
                INVALID_ARGUMENTS, f"{self._request.job} has ended and reads no more input: start another job"
            )
        if self._stdin < 0 or self._closes_input:
            raise RequestFailure(
                INVALID_ARGUMENTS, f"the standard input of {self._request.job} is closed: start another job"
            )
        body = self._pipes.body
        data = self._pipes.read_body(os.fstat(body).st_size) if body is not None else b""
        if len(self._input) + len(data) > PENDING_INPUT_BYTES:
            waiting = len(self._input)
            raise RequestFailure(
                INVALID_ARGUMENTS,
                f"{self._request.job} has not read {waiting} bytes of earlier input: send this input later",
            )
        self._input += data
        self._closes_input = request.close
        if not self._feed():
            raise RequestFailure(
                INVALID_ARGUMENTS, f"{self._request.job} has closed its standard input: start another job"
            )

    def _feed(self) -> bool:
        """Write as much pending input as the job's pipe accepts now. Return False when the job has closed its standard
        input.
        """
        try:
            while self._input:
                del self._input[: os.write(self._stdin, self._input)]
        except BrokenPipeError:
            self._input.clear()
            self._close_input()
            return False
        except OSError as error:
            if error.errno not in WRITE_LATER:
                raise
            return True
        if self._closes_input:
            self._close_input()
        return True

    def _close_input(self) -> None:
        os.close(self._stdin)
        self._stdin = -1

    def _kill(self) -> KillReport | None:
        """Kill the job. Return the report, or None when the job has already ended."""
        if self._state != RUNNING:
            return None
        report = KillReport()
        if self._status is None:
            ask_to_end(self._pid, report)
            give_up_at = time.monotonic() + GRACE_S
            while time.monotonic() < give_up_at and not reap(self._on_exit):
                # Read output meanwhile: a job that waits until its pipe has room could not end by itself.
                if self._output < 0 or not self._read_output():
                    time.sleep(0.002)
        kill_below(report, self._on_exit)
        self._end(KILLED)
        return report


def keep(assignment: Assignment, ends: SupervisorEnds, paths: GuestPaths) -> None:
    """Serve a job from its start to its end, as its keeper.

    A failed start is answered with an error, and no process of the job is left.
    """
    request = assignment.request
    try:
        JobKeeper(request, ends, assignment.body, paths).serve()  # type: ignore[arg-type]
    except (RequestFailure, OSError) as error:
        failure = error if isinstance(error, RequestFailure) else describe_os_error(error, "the job")
        if not reap():
            kill_below(KillReport())
        ends.progress.settle()
        ends.writer.send_done({"error": failure.as_error()}, is_free=False)
