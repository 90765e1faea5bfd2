"""PID 1's record of a call: its body while it is gathered, its turn in a lane, and what its supervisor reports."""

from __future__ import annotations

import json
import os
import time
from collections import deque

from guest.failures import CANCELLED, INTERNAL, INVALID_ARGUMENTS, NO_SPACE, TIMEOUT, Failure
from guest.frames import join_frame
from guest.processes import KillReport, read_oom_kills
from guest.requests import ExecRequest, parse_body_bytes, parse_call
from guest.supervisors import DONE, DONE_AND_FREE, FACTS, STREAMS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from guest.supervisors import SupervisorHandle

OVERDUE_S = 1.0
"""How long after a limit, or a cancel, a supervisor may still be killing before PID 1 takes over."""
# Each but the first is a fork for a call that has not begun; a program that kills them all is not to keep PID 1 busy.
_MAX_ATTEMPTS = 3
_LEAST_LIMIT_S = 0.01


class Body:
    """A request's body, in memory that no file system limit applies to and a child can inherit."""

    def __init__(self, declared: int) -> None:
        self.missing = declared
        self.fd: int | None = os.memfd_create("body", os.MFD_CLOEXEC) if declared else None
        self.failure: Failure | None = None

    def add(self, data: bytes) -> None:
        """Keep the next part; what cannot be kept is counted and told when the body is whole."""
        self.missing -= len(data)
        if self.missing < 0:
            self.missing = 0
            self.failure = Failure(INVALID_ARGUMENTS, "the body has more bytes than 'body_bytes' says")
        view = memoryview(data)
        try:
            while view and self.fd is not None and self.failure is None:
                view = view[os.write(self.fd, view) :]
        except OSError:
            self.failure = Failure(NO_SPACE, "no memory left in the sandbox for the body of the request")

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Call:
    """One id from its first frame to its done event. Raises Failure from the constructor when the body's size is
    missing.
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
        self.answered = False
        # What the call's supervisor reported as its end.
        self.done: dict[str, object] | None = None
        # The body has come, and the request was judged.
        self.is_whole = False
        self.lane: str | None = None
        self.has_waited = False
        self._relayed = dict.fromkeys(STREAMS, 0)
        self._data_headers: dict[int, bytes] = {}

    def prepare(self) -> None:
        """Judge the request, now that its body is whole. Raises Failure when it is wrong."""
        self.is_whole = True
        if self.body.failure is not None:
            raise self.body.failure
        self.request = parse_call(self.header)
        self.lane = getattr(self.request, "lane", None)
        self._is_exec = isinstance(self.request, ExecRequest)
        self.oom_kills = read_oom_kills() if self._is_exec else None
        self._started_at = time.monotonic()
        self.limit_at = self._started_at + self.request.timeout_s
        self._overdue_at = self.limit_at + OVERDUE_S

    def end_wait(self) -> None:
        """It may run now: what it has waited for others of its lane was its own time."""
        if not self.has_waited:
            return
        left_s = max(self.limit_at - time.monotonic(), _LEAST_LIMIT_S)
        self.request.timeout_s = self.header["timeout_s"] = left_s

    def overslept_end(self) -> dict[str, object]:
        """The done fields of a call whose limit came before its turn."""
        waited_s = time.monotonic() - self._started_at
        message = f"not started: it waited {waited_s:.1f} s for its turn behind other calls of this session"
        return {"error": {"code": TIMEOUT, "message": message}}

    def entrust(self, supervisor: SupervisorHandle, take_s: float | None) -> None:
        """The call is this supervisor's now, which is looked after once `take_s` is over, or else the limit."""
        self.supervisor = supervisor
        self.attempts += 1
        self.watch_at = self._overdue_at if take_s is None else min(time.monotonic() + take_s, self._overdue_at)

    def cancel(self) -> None:
        """Ask the supervisor to end what it runs; PID 1 does it when that takes too long."""
        if not self.cancelled and self.supervisor is not None:
            self.cancelled = True
            self._overdue_at = min(self._overdue_at, time.monotonic() + OVERDUE_S)
            self.watch_at = min(self.watch_at, self._overdue_at)
            self.supervisor.cancel()

    def judge_delay(self, supervisor: SupervisorHandle) -> bool:
        """At `watch_at`: whether the supervisor is to be killed. Output that waits for the host is no reason; being
        stopped is.
        """
        if time.monotonic() < self._overdue_at:
            self.watch_at = self._overdue_at
            return not supervisor.progress.is_taken
        self.watch_at = float("inf")
        self.overdue = not supervisor.progress.is_settled
        return self.overdue

    def may_try_again(self, supervisor: SupervisorHandle) -> bool:
        """Whether the supervisor has died without touching the call, which is then another's."""
        return not (supervisor.progress.is_taken or self.cancelled or self.overdue) and self.attempts < _MAX_ATTEMPTS

    def relay(self, records: list[tuple[int, bytes]]) -> list[bytes]:
        """The data frames of what the supervisor reports; its end is kept as `done`."""
        frames = []
        for kind, payload in records:
            if kind in (DONE, DONE_AND_FREE):
                self.done = json.loads(payload)
            elif payload and kind != FACTS:
                self._relayed[STREAMS[kind]] += len(payload)
                frames.append(join_frame(self._data_header(kind), payload))
        return frames

    def close(self) -> None:
        self.body.close()

    def unstarted_end(self) -> dict[str, object]:
        """The done fields of a call that was cancelled while its body was still coming."""
        if self.header["op"] != "exec":
            return {"error": {"code": CANCELLED, "message": "cancelled"}}
        return self._exec_end(0.0, self._asked_streams(), None, False)

    def lost_end(self, report: KillReport) -> dict[str, object]:
        """The done fields of a call whose supervisor ended without a report: by a tool, or by PID 1."""
        if not (self.cancelled or self.overdue):
            what = "the call killed its own supervisor" if self._is_exec else "the process of this request was killed"
            if self.supervisor is not None and not self.supervisor.progress.is_taken:
                what = "not started: its supervisors were killed before they could"
            return {"error": {"code": INTERNAL, "message": what}, "kill": report.as_field()}
        if not self._is_exec:
            code = CANCELLED if self.cancelled else TIMEOUT
            return {"error": {"code": code, "message": "ended by PID 1: the request did not end by itself"}}
        streams = self._asked_streams()
        oom_rose = read_oom_kills() != self.oom_kills
        return self._exec_end(time.monotonic() - self._started_at, streams, report, oom_rose)

    def _asked_streams(self) -> dict[str, dict[str, int]]:
        """`streams` of an end that no supervisor told: what was sent of each that was asked for."""
        capture = self.header.get("capture")
        asked = capture if isinstance(capture, dict) else {}
        names = (
            ("stdout", "stderr")
            if "stream" in asked
            else [name for name in ("stdout", "stderr", "merged") if name in asked]
        )
        return {name: {"total": self._relayed[name], "head": self._relayed[name], "tail": 0} for name in names}

    def _exec_end(
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


class Lanes:
    """Who runs in each lane, and who waits. A call without a lane never waits."""

    __slots__ = ("_running", "_waiting")

    def __init__(self) -> None:
        self._running: dict[str, Call] = {}
        self._waiting: dict[str, deque[Call]] = {}

    @property
    def waiting(self) -> list[Call]:
        return [call for queue in self._waiting.values() for call in queue]

    def enter(self, call: Call) -> bool:
        """Whether the call may run now. Otherwise it waits, until `leave` of another gives it."""
        lane = call.lane
        if lane is None:
            return True
        if self._running.setdefault(lane, call) is call:
            return True
        self._waiting.setdefault(lane, deque()).append(call)
        return False

    def leave(self, call: Call) -> Call | None:
        """The call has its answer, whether it ran or still waited; gives the one that may run now in its place."""
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
