"""PID 1's record of a call: the body while it arrives, the call's lane (calls of one lane run one after the other), and
the reports of the supervisor, the process that serves the call.

Invariant: every call gets exactly one done event, even if its supervisor is stopped, killed or does not answer. A call
is given to another supervisor only while `progress` shows that none has begun to serve it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque

from guest.call_pipes import DONE, DONE_AND_FREE, FACTS, STREAMS, ReportReader, give, send_cancel
from guest.commands.exec_request import ExecRequest
from guest.failures import CANCELLED, INTERNAL, INVALID_ARGUMENTS, NO_SPACE, TIMEOUT, RequestFailure
from guest.fields import parse_body_bytes
from guest.frames import join_frame
from guest.processes import KillReport, read_oom_kills
from guest.requests import REQUESTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any

    from guest.call_pipes import Progress

OVERDUE_S = 1.0
"""Time after a limit or a cancel during which the supervisor itself may kill the call's processes, in seconds. PID 1
kills the supervisor afterwards.
"""
# Limit the attempts, each of which forks a supervisor: a program that kills every supervisor must not keep PID 1 busy.
_MAX_ATTEMPTS = 3
_MIN_LIMIT_S = 0.01
_READ_BYTES = 65_536


class Body:
    """The body of a request, in a memory file. Such a file needs no space in a file system, and a child can inherit its
    descriptor.
    """

    def __init__(self, declared: int) -> None:
        self.missing = declared
        self.fd: int | None = os.memfd_create("body", os.MFD_CLOEXEC) if declared else None
        self.failure: RequestFailure | None = None

    def add(self, data: bytes) -> None:
        """Store the next part. If it cannot be stored, count its bytes and set `failure`."""
        self.missing -= len(data)
        if self.missing < 0:
            self.missing = 0
            self.failure = RequestFailure(INVALID_ARGUMENTS, "the body has more bytes than 'body_bytes' says")
        view = memoryview(data)
        try:
            while view and self.fd is not None and self.failure is None:
                view = view[os.write(self.fd, view) :]
        except OSError:
            self.failure = RequestFailure(
                NO_SPACE, "the sandbox has no memory left for the request: end other processes, or send less"
            )

    def close(self) -> None:
        """Close the memory file."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Call:
    """A call, from its first frame to its done event.

    The constructor raises RequestFailure when the header does not state the size of the body.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        self.id: str = header["id"]
        self.header = header
        self.body = Body(parse_body_bytes(header))
        self.supervisor: SupervisorHandle | None = None
        self.attempts = 0
        self.watch_at = 0.0
        self.cancelled = False
        self.overdue = False
        # The signal that ended the supervisor before it reported the end of the call.
        self.killed_by: int | None = None
        self.answered = False
        # The done fields that the supervisor has reported.
        self.done: dict[str, object] | None = None
        # The body is complete, and the request was parsed.
        self.is_whole = False
        self.lane: str | None = None
        self.has_waited = False
        self._relayed = dict.fromkeys(STREAMS, 0)
        self._data_headers: dict[int, bytes] = {}

    def prepare(self) -> None:
        """Parse the request when its body has arrived completely. Raises RequestFailure when the request is invalid."""
        self.is_whole = True
        if self.body.failure is not None:
            raise self.body.failure
        self.request = REQUESTS[self.header["op"]](self.header)
        self.lane = self.request.lane
        self._is_exec = isinstance(self.request, ExecRequest)
        self.oom_kills = read_oom_kills() if self._is_exec else None
        self._started_at = time.monotonic()
        self.limit_at = self._started_at + self.request.timeout_s
        self._overdue_at = self.limit_at + OVERDUE_S

    def end_wait(self) -> None:
        """Set the call's deadline when its wait in the lane ends. The waiting time counts towards its time limit."""
        if not self.has_waited:
            return
        remaining_s = max(self.limit_at - time.monotonic(), _MIN_LIMIT_S)
        self.request.timeout_s = remaining_s

    def build_queue_timeout(self) -> dict[str, object]:
        """Return the done fields of a call that reached its time limit while it waited in its lane."""
        waited_s = time.monotonic() - self._started_at
        message = f"not started: it waited {waited_s:.1f} s for its turn behind other calls of this session"
        return {"error": {"code": TIMEOUT, "message": message}}

    def entrust(self, supervisor: SupervisorHandle, take_s: float | None) -> None:
        """Record which supervisor serves the call.

        PID 1 checks the supervisor after `take_s` seconds, or after the limit when `take_s` is None.
        """
        self.supervisor = supervisor
        self.attempts += 1
        self.watch_at = self._overdue_at if take_s is None else min(time.monotonic() + take_s, self._overdue_at)

    def cancel(self) -> None:
        """Ask the supervisor to end the call. PID 1 kills the supervisor when this takes longer than OVERDUE_S."""
        if not self.cancelled and self.supervisor is not None:
            self.cancelled = True
            # A cancel must not move the deadline to a later time.
            self._overdue_at = min(self._overdue_at, time.monotonic() + OVERDUE_S)
            self.watch_at = min(self.watch_at, self._overdue_at)
            self.supervisor.cancel()

    def check_delay(self, supervisor: SupervisorHandle) -> bool:
        """Return whether PID 1 must kill the supervisor. PID 1 calls this at `watch_at`.

        A supervisor that waits for the host to read output must live. A supervisor that was stopped (SIGSTOP) must be
        killed.
        """
        if time.monotonic() < self._overdue_at:
            self.watch_at = self._overdue_at
            # At the first check, after `take_s`, the supervisor must have begun to serve the call. The next check is at
            # the deadline.
            return not supervisor.progress.is_taken
        # A settled call has no running processes; only its output waits for the host. Do not kill its supervisor,
        # because the output would be lost.
        self.watch_at = float("inf")
        self.overdue = not supervisor.progress.is_settled
        return self.overdue

    def can_retry(self, supervisor: SupervisorHandle) -> bool:
        """Return whether another supervisor may serve the call: the dead supervisor did nothing for the call."""
        return not (supervisor.progress.is_taken or self.cancelled or self.overdue) and self.attempts < _MAX_ATTEMPTS

    def relay(self, records: list[tuple[int, bytes]]) -> list[bytes]:
        """Convert the supervisor's records to data frames for the host. Store the record that ends the call as
        `done`.
        """
        frames = []
        for kind, payload in records:
            if kind in (DONE, DONE_AND_FREE):
                self.done = json.loads(payload)
            elif payload and kind != FACTS:
                self._relayed[STREAMS[kind]] += len(payload)
                frames.append(join_frame(self._data_header(kind), payload))
        return frames

    def close(self) -> None:
        """Release the body."""
        self.body.close()

    def build_unstarted_end(self) -> dict[str, object]:
        """Return the done fields of a call that was cancelled before its body was complete."""
        if self.header["op"] != "exec":
            return {"error": {"code": CANCELLED, "message": "cancelled"}}
        return self._build_exec_end(0.0, self._count_streams(), None, False)

    def build_lost_end(self, report: KillReport) -> dict[str, object]:
        """Return the done fields for a call after its supervisor ended without a report.

        A tool or PID 1 has killed the supervisor.
        """
        if not (self.cancelled or self.overdue):
            return self._build_killed_end(report)
        if not self._is_exec:
            code = CANCELLED if self.cancelled else TIMEOUT
            return {"error": {"code": code, "message": "ended by PID 1: the request did not end by itself"}}
        return self._build_stopped_end(report)

    def _build_killed_end(self, report: KillReport) -> dict[str, object]:
        """Return the done fields when a program of the sandbox has killed the supervisor.

        A supervisor that has ended without a signal has a bug.
        """
        if self.killed_by is None:
            failure = RequestFailure(INTERNAL, "the process of this request ended without a report")
        elif self.supervisor is not None and not self.supervisor.progress.is_taken:
            failure = RequestFailure(
                CANCELLED, "not started: a program kills the processes that start calls; end it and send the call again"
            )
        elif self._is_exec:
            # To the caller, a command that kills its supervisor looks like one that kills its own shell.
            return {**self._build_stopped_end(report), "signal": self.killed_by, "supervisor_killed": True}
        else:
            failure = RequestFailure(
                CANCELLED, "a program of the sandbox killed the process of this request: check what it did, repeat it"
            )
        return {"error": failure.as_error(), "kill": report.as_field()}

    def _build_stopped_end(self, report: KillReport) -> dict[str, object]:
        oom_rose = read_oom_kills() != self.oom_kills
        return self._build_exec_end(time.monotonic() - self._started_at, self._count_streams(), report, oom_rose)

    def _count_streams(self) -> dict[str, dict[str, int]]:
        """Return the field `streams` when no supervisor has reported it: for each requested stream, the bytes that were
        sent.
        """
        capture = self.header.get("capture")
        requested = capture if isinstance(capture, dict) else {}
        names = (
            ("stdout", "stderr")
            if "stream" in requested
            else [name for name in ("stdout", "stderr", "merged") if name in requested]
        )
        return {name: {"total": self._relayed[name], "head": self._relayed[name], "tail": 0} for name in names}

    def _build_exec_end(
        self, run_s: float, streams: dict[str, dict[str, int]], report: KillReport | None, oom_rose: bool
    ) -> dict[str, object]:
        return {
            "exit_code": None,
            "signal": None,
            "timed_out": self.overdue and not self.cancelled,
            "cancelled": self.cancelled or report is None,
            "oom": oom_rose,
            "run_s": round(run_s, 6),
            "streams": streams,
            "kill": report.as_field() if report is not None else None,
        }

    def _data_header(self, kind: int) -> bytes:
        header = self._data_headers.get(kind)
        if header is None:
            header = json.dumps({"id": self.id, "ev": "data", "stream": STREAMS[kind]}).encode()
            self._data_headers[kind] = header
        return header


class SupervisorHandle:
    """PID 1's record of one supervisor: its pid, its pipes, and the call that the supervisor serves."""

    __slots__ = ("_channel", "_reader", "call", "is_free", "pid", "progress", "reports")

    def __init__(self, pid: int, reports: int, channel: _socket.socket, progress: Progress, call: Call) -> None:
        self.pid = pid
        self.reports = reports
        self.progress = progress
        self.call: Call | None = call
        # True when the supervisor has reported that it waits for its next call.
        self.is_free = False
        self._channel = channel
        self._reader = ReportReader()

    def give(self, call: Call) -> bool:
        """Send the next call to the supervisor. Return whether the call was sent."""
        # Reset the state before the call is sent: a later reset could overwrite the supervisor's `take`, and PID 1
        # could then run the call twice.
        self.progress.reset()
        if not give(self._channel, call.request, call.body.fd, call.oom_kills):
            return False
        # Send SIGCONT: a program of another call may have stopped this supervisor (SIGSTOP) while it waited.
        os.kill(self.pid, signal.SIGCONT)
        self.call = call
        self.is_free = False
        return True

    def cancel(self) -> None:
        """Send a cancel of the current call to the supervisor."""
        send_cancel(self._channel)

    def read_reports(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Return the complete records, and whether any bytes were read.

        No bytes are read when the pipe is empty or at its end.
        """
        try:
            data = os.read(self.reports, _READ_BYTES)
        except BlockingIOError:
            return [], False
        records = self._reader.feed(data)
        self.is_free = bool(records) and records[-1][0] == DONE_AND_FREE
        return records, bool(data)

    def close(self) -> None:
        """Close PID 1's ends of the report pipe and of the channel."""
        os.close(self.reports)
        self._channel.close()


class CallLanes:
    """The running call of each lane, and the calls that wait for its end. A call without a lane never waits.

    Invariant: at most one call of a lane runs. Waiting calls run in the order in which they came.
    """

    __slots__ = ("_running", "_waiting")

    def __init__(self) -> None:
        self._running: dict[str, Call] = {}
        self._waiting: dict[str, deque[Call]] = {}

    @property
    def waiting(self) -> list[Call]:
        """Return the calls that wait in any lane."""
        return [call for queue in self._waiting.values() for call in queue]

    def enter(self, call: Call) -> bool:
        """Put the call into its lane. Return whether the call may run now; otherwise it waits until `leave` returns
        it.
        """
        lane = call.lane
        if lane is None:
            return True
        if self._running.setdefault(lane, call) is call:
            return True
        self._waiting.setdefault(lane, deque()).append(call)
        return False

    def leave(self, call: Call) -> Call | None:
        """Remove a call that has been answered, even if it still waited.

        Return the call that may run now in its place, or None.
        """
        lane = call.lane
        if lane is None:
            return None
        queue = self._waiting.get(lane)
        if self._running.get(lane) is not call:
            if queue is not None and call in queue:
                queue.remove(call)
            return None
        del self._running[lane]
        if not queue:
            self._waiting.pop(lane, None)
            return None
        following = queue.popleft()
        self._running[lane] = following
        return following
