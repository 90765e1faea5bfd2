"""PID 1's loop: requests in, reports out, and an eye on every process; it never waits for one of them."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time

from guest.calls import Call
from guest.cleanup import Cleanup, kill_everything, merge_kills
from guest.failures import Failure, describe_os_error
from guest.frames import FrameDecoder, FrameError, encode_frame
from guest.kernel import PR_SET_DUMPABLE, set_process_flag
from guest.outbox import HostGone, Outbox
from guest.places import Places
from guest.process_tree import reap
from guest.requests import CALL_OPS, is_request_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from guest.frames import Frame
    from guest.process_tree import KillReport

_STDIN, _STDOUT = 0, 1
_READ_BYTES = 65_536
# Reports wait in their pipes while the host has more than this to take.
_OUTBOX_BYTES = 262_144
_TICK_MS = 1
_LONGEST_WAIT_S = 3600.0


class BrokenProtocol(Exception):
    """The host sent what the protocol does not know."""


class Loop:
    def __init__(self, places: Places) -> None:
        self._places = places
        self._decoder = FrameDecoder()
        self._outbox = Outbox(_STDOUT)
        self._calls: dict[str, Call] = {}
        self._by_reports: dict[int, Call] = {}
        self._by_pid: dict[int, Call] = {}
        self._ending: set[int] = set()
        self._cleanup = Cleanup()
        os.set_blocking(_STDIN, False)

    def run(self) -> NoReturn:
        """Serve until the host goes away: a sandbox never outlives the sandboxd that feeds it."""
        code = 0
        try:
            self._send({"ev": "hello", "v": 1})
            while True:
                self._serve_events()
                self._look_after_processes()
        except (HostGone, EOFError):
            code = 0
        except (FrameError, BrokenProtocol) as error:
            code = 1
            self._say_last(str(error))
        kill_everything()
        os._exit(code)

    def _serve_events(self) -> None:
        poller = select.poll()
        poller.register(_STDIN, select.POLLIN)
        if self._outbox.size:
            poller.register(_STDOUT, select.POLLOUT)
        if self._outbox.size < _OUTBOX_BYTES:
            for fd in self._by_reports:
                poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(self._wait_ms()):
            if fd == _STDIN:
                self._read_requests()
            elif fd == _STDOUT:
                self._outbox.flush()
            elif fd in self._by_reports:
                self._read_reports(self._by_reports[fd])

    def _wait_ms(self) -> int | None:
        if self._ending or self._cleanup.is_active:
            return _TICK_MS
        watched = [call.watch_at for call in self._by_pid.values() if not call.answered]
        if not watched:
            return None
        return int(min(max(min(watched) - time.monotonic(), 0.0), _LONGEST_WAIT_S) * 1000) + 1

    def _read_requests(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        for frame in self._decoder.feed(data):
            self._take_request(frame)

    def _take_request(self, frame: Frame) -> None:
        header = frame.header
        op, call_id = header.get("op"), header.get("id")
        if not is_request_id(call_id):
            raise BrokenProtocol("a request without a valid id")
        if op == "ping":
            self._send({"id": call_id, "ev": "pong"})
        elif op == "data":
            self._add_body(self._calls.get(call_id), frame.body)
        elif op == "cancel":
            self._cancel(self._calls.get(call_id))
        elif op in CALL_OPS:
            if call_id in self._calls:
                raise BrokenProtocol("an id that is in use")
            self._begin_call(frame)
        else:
            raise BrokenProtocol("an unknown op")

    def _begin_call(self, frame: Frame) -> None:
        try:
            call = Call(frame.header)
        except (Failure, OSError) as error:
            self._send({"id": frame.header["id"], "ev": "done", "error": _as_failure(error).as_error()})
            return
        self._calls[call.id] = call
        self._add_body(call, frame.body)

    def _add_body(self, call: Call | None, data: bytes) -> None:
        # A call that has ended, by a cancel, may still get parts of its body.
        if call is None or call.pid:
            return
        call.body.add(data)
        if call.body.missing == 0:
            self._start(call)

    def _start(self, call: Call) -> None:
        try:
            call.start(self._places)
        except (Failure, OSError) as error:
            self._answer(call, {"error": _as_failure(error).as_error()})
        else:
            self._by_reports[call.reports] = call
            self._by_pid[call.pid] = call

    def _cancel(self, call: Call | None) -> None:
        if call is None:
            return
        if call.pid:
            call.cancel()
        else:
            self._answer(call, call.unstarted_end())

    def _read_reports(self, call: Call) -> bool:
        """Relay one read's worth; False when there is nothing more now."""
        frames, more = call.read_reports()
        for frame in frames:
            self._outbox.put(frame)
        done = call.done
        if done is not None and not call.answered and not _left_survivors(done):
            self._answer(call, done)
        if not more:
            self._forget_reports(call)
            self._ending.add(call.pid)
        return more

    def _look_after_processes(self) -> None:
        now = time.monotonic()
        for call in [call for call in self._by_pid.values() if now >= call.watch_at and not call.answered]:
            self._end_overdue(call)
        if not (self._ending or self._cleanup.is_active):
            return
        no_child_left = reap(self._on_exit)
        if self._cleanup.is_active:
            if not no_child_left:
                self._cleanup.step(set(self._by_pid))
                no_child_left = reap(self._on_exit)
            for call, report in self._cleanup.take_finished(no_child_left):
                self._answer(call, _held_end(call, report))

    def _end_overdue(self, call: Call) -> None:
        """The limit is long over. Output that waits for the host is no reason to kill; a supervisor that was stopped is."""
        call.watch_at = float("inf")
        if not call.is_settled:
            call.overdue = True
            os.kill(call.pid, signal.SIGKILL)
            self._ending.add(call.pid)

    def _on_exit(self, pid: int, _status: int) -> None:
        call = self._by_pid.pop(pid, None)
        self._ending.discard(pid)
        if call is None:
            return
        # Its pipe has an end now, and at most one pipe's worth before it.
        while call.reports in self._by_reports and self._read_reports(call):
            pass
        self._ending.discard(pid)
        call.close()
        if not call.answered:
            self._cleanup.hold(call)

    def _forget_reports(self, call: Call) -> None:
        self._by_reports.pop(call.reports, None)

    def _answer(self, call: Call, fields: dict[str, object]) -> None:
        call.answered = True
        self._calls.pop(call.id, None)
        if not call.pid:
            call.close()
        self._send({"id": call.id, "ev": "done", **fields})

    def _send(self, header: dict[str, object]) -> None:
        self._outbox.put(encode_frame(header))

    def _say_last(self, message: str) -> None:
        try:
            self._send({"ev": "fatal", "message": message})
            self._outbox.flush_last()
        except HostGone:
            return


def _held_end(call: Call, report: KillReport) -> dict[str, object]:
    if call.done is None:
        return call.lost_end(report)
    return {**call.done, "kill": merge_kills(call.done.get("kill"), report)}


def _as_failure(error: Failure | OSError) -> Failure:
    if isinstance(error, Failure):
        return error
    return describe_os_error(error, "the sandbox has no room for another request")


def _left_survivors(done: dict[str, object]) -> bool:
    kill = done.get("kill")
    return isinstance(kill, dict) and bool(kill["survivors"])


def main(places: Places | None = None) -> NoReturn:
    """Be PID 1."""
    if os.getpid() != 1:
        sys.exit("the guest runs as PID 1 of a sandbox and nowhere else")
    # Python's own handler would let any program of the sandbox interrupt PID 1; without one the kernel shields it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    loop = Loop(places or Places())
    gc.collect()
    gc.freeze()
    # Last, because what comes before may need /proc/self: from here on no program can read, stop or trace PID 1.
    set_process_flag(PR_SET_DUMPABLE, 0)
    loop.run()
