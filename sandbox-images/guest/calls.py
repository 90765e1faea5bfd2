"""PID 1's record of a call: its body while it is gathered, then its process."""

from __future__ import annotations

import json
import mmap
import os
import time

from guest import oom
from guest.child import serve_request
from guest.failures import CANCELLED, INTERNAL, INVALID_ARGUMENTS, NO_SPACE, TIMEOUT, Failure
from guest.frames import join_frame
from guest.pipes import CallPipes
from guest.reports import DONE, STREAMS, ReportReader, ReportWriter
from guest.requests import ExecRequest, parse_body_bytes, parse_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from guest.places import Places
    from guest.process_tree import KillReport

OVERDUE_S = 0.7
"""How long after a limit, or a cancel, a supervisor may still be killing before PID 1 takes over."""


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
    """One id from its first frame to its done event. Raises Failure from the constructor when the body's size is missing."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.id: str = header["id"]
        self.header = header
        self.body = Body(parse_body_bytes(header))
        self.pid = 0
        self.reports = -1
        self.control = -1
        self.watch_at = 0.0
        self.cancelled = False
        self.overdue = False
        self.answered = False
        # What the call's process reported as its end.
        self.done: dict[str, object] | None = None
        self._reader = ReportReader()
        self._relayed = dict.fromkeys(STREAMS, 0)
        self._data_headers: dict[int, bytes] = {}

    @property
    def is_settled(self) -> bool:
        return self._settled[0] == 1

    def start(self, places: Places) -> None:
        """Fork the call's process. Raises Failure when the request is wrong, OSError when there is no room for a process."""
        if self.body.failure is not None:
            raise self.body.failure
        self._request = parse_call(self.header)
        self._is_exec = isinstance(self._request, ExecRequest)
        self._oom_kills = oom.read_oom_kills() if self._is_exec else None
        self._settled = mmap.mmap(-1, 1)
        self._started_at = time.monotonic()
        self.watch_at = self._started_at + self._request.timeout_s + OVERDUE_S
        childs_ends: list[int] = []
        try:
            self.reports, reports_w = _open_pipe()
            childs_ends.append(reports_w)
            control_r, self.control = _open_pipe()
            childs_ends.append(control_r)
            self.pid = os.fork()
            if self.pid == 0:
                pipes = CallPipes(ReportWriter(reports_w), control_r, self.body.fd, self._settled, self._oom_kills)
                self._run_child(pipes, places)
        finally:
            for fd in childs_ends:
                os.close(fd)
            self.body.close()

    def _run_child(self, pipes: CallPipes, places: Places) -> None:
        try:
            serve_request(self._request, pipes, places)
        finally:
            # Whatever happened, a child never goes back into PID 1's loop.
            os._exit(0)

    def cancel(self) -> None:
        """Ask the process to end what it runs; PID 1 does it when that takes too long."""
        if not self.cancelled and self.pid:
            self.cancelled = True
            self.watch_at = min(self.watch_at, time.monotonic() + OVERDUE_S)
            try:
                os.write(self.control, b"c")
            except OSError:
                # The process has ended, which the loop is about to learn.
                return

    def read_reports(self) -> tuple[list[bytes], bool]:
        """The data frames that have come, and whether there was anything: b"" at the end, or a pipe that is empty."""
        try:
            data = os.read(self.reports, 65_536)
        except BlockingIOError:
            return [], False
        frames = []
        for kind, payload in self._reader.feed(data):
            if kind == DONE:
                self.done = json.loads(payload)
            elif payload:
                self._relayed[STREAMS[kind]] += len(payload)
                frames.append(join_frame(self._data_header(kind), payload))
        return frames, bool(data)

    def close(self) -> None:
        """Give back what PID 1 holds for the call's process."""
        for fd in (self.reports, self.control):
            if fd >= 0:
                os.close(fd)
        self.reports = self.control = -1
        self.body.close()

    def unstarted_end(self) -> dict[str, object]:
        """The done fields of a call that was cancelled while its body was still coming."""
        if self.header["op"] != "exec":
            return {"error": {"code": CANCELLED, "message": "cancelled"}}
        return self._exec_end(0.0, {}, None, False)

    def lost_end(self, report: KillReport) -> dict[str, object]:
        """The done fields of a call whose process ended without a report: by its own tool, or by PID 1."""
        if not (self.cancelled or self.overdue):
            what = "the call killed its own supervisor" if self._is_exec else "the process of this request was killed"
            return {"error": {"code": INTERNAL, "message": what}, "kill": report.as_field()}
        if not self._is_exec:
            code = CANCELLED if self.cancelled else TIMEOUT
            return {"error": {"code": code, "message": "ended by PID 1: the request did not end by itself"}}
        streams = {
            name: {"total": count, "head": count, "tail": 0}
            for name, count in self._relayed.items()
            if count or (isinstance(self._request, ExecRequest) and self._request.caps.get(name))
        }
        oom_rose = oom.read_oom_kills() != self._oom_kills
        return self._exec_end(time.monotonic() - self._started_at, streams, report, oom_rose)

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


def _open_pipe() -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends
