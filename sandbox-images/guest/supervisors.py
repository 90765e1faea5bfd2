"""The supervisors: processes that PID 1 forks to serve calls, PID 1's record of them, and what the two share.

They share the channel on which a call and its cancel go down, the pipe on which reports come up, and how far the call
is. A supervisor builds a `RequestContext` from its ends for the function that serves a file or search request.
"""

from __future__ import annotations

# Not `socket`, which imports more than all of the guest: PID 1 should stay small.
import _socket
import contextlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time

from guest.commands.execution import Execution
from guest.commands.job_requests import JobStartRequest
from guest.failures import CANCELLED, INTERNAL, TIMEOUT, Failure, describe_os_error
from guest.kernel import PR_SET_CHILD_SUBREAPER, WRITE_LATER, set_process_flag
from guest.processes import KillReport, kill_below, reap
from guest.requests import ExecRequest, load_server, parse_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from guest.calls import Call
    from guest.paths import GuestPaths
    from guest.requests import CallRequest

_UNCLEAN_ENDS = (CANCELLED, INTERNAL, TIMEOUT)
IDLE_S = 1.0
"""How long a supervisor waits for its next call: a sandbox at rest is PID 1 alone."""
TAKE_S = 0.3
"""How long a supervisor that waited may take to take a call: longer than the scheduler of a busy host, and little of a
limit.
"""
_READ_BYTES = 65_536
_GIVEN, _TAKEN, _SETTLED = range(3)
STREAMS = ("stdout", "stderr", "merged", "file", "live", "live_stderr", "lines")
DONE = 255
DONE_AND_FREE = 254
"""As DONE, from a supervisor that waits for its next call."""
FACTS = 253
"""What the keeper of a job tells of it, unasked."""
CHUNK_BYTES = 65_536
_RECORD = struct.Struct(">BI")
_MAX_PACKET = 65_536
_FD_BYTES = 4
_CANCEL_PACKET = b"c"
CANCEL = "cancel"
_MAX_FDS = 4096


class Progress:
    """Given, taken, settled. It reaches PID 1 even from a supervisor that was killed, or whose pipe is full of output
    nobody takes.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def reset(self) -> None:
        """PID 1 gives a call; nothing of it has begun."""
        self._memory[0] = _GIVEN

    def take(self) -> None:
        """From here on something of the call may have happened."""
        self._memory[0] = _TAKEN

    def settle(self) -> None:
        """Nothing of the call runs any more."""
        self._memory[0] = _SETTLED

    @property
    def is_taken(self) -> bool:
        return self._memory[0] != _GIVEN

    @property
    def is_settled(self) -> bool:
        return self._memory[0] == _SETTLED


class ReportWriter:
    """The supervisor's end, non-blocking: while a program runs nothing may wait for PID 1."""

    __slots__ = ("_pending", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending = memoryview(b"")

    @property
    def is_full(self) -> bool:
        return len(self._pending) > 0

    def offer(self, stream: str, data: bytes) -> None:
        """Start to send one piece of at most CHUNK_BYTES; only while not full."""
        self._pending = memoryview(_RECORD.pack(STREAMS.index(stream), len(data)) + data)
        self.flush()

    def flush(self) -> None:
        """Send what the pipe takes now."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self.fd, self._pending) :]
        except OSError as error:
            if error.errno not in WRITE_LATER:
                raise

    def finish(self) -> float:
        """Wait until PID 1 has room for what was offered; gives for how many seconds."""
        started = time.monotonic()
        self._write_all(self._pending)
        self._pending = memoryview(b"")
        return time.monotonic() - started

    def send(self, stream: str, data: bytes) -> None:
        """Send all of `data`, waiting for PID 1 where it must."""
        view = memoryview(data)
        for at in range(0, len(data), CHUNK_BYTES):
            self._send_record(STREAMS.index(stream), view[at : at + CHUNK_BYTES])

    def send_done(self, fields: dict[str, object], is_free: bool) -> None:
        self._send_record(DONE_AND_FREE if is_free else DONE, json.dumps(fields).encode())

    def send_facts(self, facts: dict[str, object]) -> None:
        self._send_record(FACTS, json.dumps(facts).encode())

    def _send_record(self, kind: int, data: bytes | memoryview) -> None:
        self.finish()
        self._write_all(memoryview(_RECORD.pack(kind, len(data)) + data))

    def _write_all(self, view: memoryview) -> None:
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except OSError as error:
                if error.errno not in WRITE_LATER:
                    raise
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                poller.poll()


class ReportReader:
    """PID 1's end: gathers bytes into records, holding at most one unfinished."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self._buffer += data
        records = []
        at = 0
        while len(self._buffer) - at >= _RECORD.size:
            kind, size = _RECORD.unpack_from(self._buffer, at)
            end = at + _RECORD.size + size
            if end > len(self._buffer):
                break
            records.append((kind, bytes(self._buffer[at + _RECORD.size : end])))
            at = end
        del self._buffer[:at]
        return records


class Assignment:
    """One call, as its supervisor gets it. `oom_kills` is the cgroup's counter at the start."""

    __slots__ = ("body", "oom_kills", "request")

    def __init__(self, request: CallRequest, body: int | None, oom_kills: int | None) -> None:
        self.request = request
        self.body = body
        self.oom_kills = oom_kills


def open_channel() -> tuple[_socket.socket, _socket.socket]:
    """PID 1's end, which never waits, and the supervisor's. Raises OSError."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def give(channel: _socket.socket, header: Mapping[str, object], body: int | None, oom_kills: int | None) -> bool:
    """Whether the call could be handed over: not when its header is long, or when nobody listens any more."""
    packet = json.dumps((header, oom_kills)).encode()
    if len(packet) > _MAX_PACKET:
        return False
    rights = [] if body is None else [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, body.to_bytes(_FD_BYTES, sys.byteorder))]
    try:
        channel.sendmsg((packet,), rights)
    except OSError:
        return False
    return True


def send_cancel(channel: _socket.socket) -> None:
    try:
        channel.send(_CANCEL_PACKET)
    except OSError:
        # The supervisor has ended, which PID 1's loop is about to learn.
        return


def has_cancel(channel: _socket.socket) -> bool:
    """Whether PID 1 has said something while a call is served: only a cancel comes then."""
    try:
        channel.recv(1, _socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


class SupervisorEnds:
    """A supervisor's ends: reports up, calls and words of cancel down, and how far it is."""

    __slots__ = ("channel", "progress", "writer")

    def __init__(self, writer: ReportWriter, channel: _socket.socket, progress: Progress) -> None:
        self.writer = writer
        self.channel = channel
        self.progress = progress

    def close_all_others(self, *kept: int | None) -> None:
        """Close every descriptor from 3 on but these ends and `kept`."""
        low = 2
        for fd in sorted(fd for fd in (self.writer.fd, self.channel.fileno(), *kept) if fd is not None):
            os.closerange(low + 1, fd)
            low = fd
        os.closerange(low + 1, _MAX_FDS)

    def open_call(self, body: int | None) -> CallPipes:
        """Return what serves a call with that body."""
        return CallPipes(self, body)

    def receive(self) -> Assignment | str | None:
        """Wait for what PID 1 sends: the next call, or CANCEL. None: PID 1 has closed its end, or there is no
        descriptor left for the body.
        """
        # Close-on-exec: the body is the supervisor's, programs are given their stdin only.
        packet, rights, flags, _ = self.channel.recvmsg(
            _MAX_PACKET, _socket.CMSG_LEN(_FD_BYTES), _socket.MSG_CMSG_CLOEXEC
        )
        if packet == _CANCEL_PACKET:
            return CANCEL
        if not packet or flags & _socket.MSG_CTRUNC:
            return None
        header, oom_kills = json.loads(packet)
        body = int.from_bytes(rights[0][2], sys.byteorder) if rights else None
        return Assignment(parse_call(header), body, oom_kills)


class CallPipes:
    """What serves one call: its supervisor's ends, and its body."""

    __slots__ = ("_channel", "_progress", "body", "control", "writer")

    def __init__(self, ends: SupervisorEnds, body: int | None) -> None:
        self.writer = ends.writer
        self.control = ends.channel.fileno()
        self.body = body
        self._channel = ends.channel
        self._progress = ends.progress

    def settle(self) -> None:
        """Tell PID 1's watchdog that nothing of the call runs any more."""
        self._progress.settle()

    def read_body(self, size: int) -> bytes:
        """The body's first bytes."""
        return os.pread(self.body, size, 0) if self.body is not None and size else b""

    def open_stdin(self, offset: int) -> int:
        """The rest of the body as a file to read, /dev/null when there is none."""
        if self.body is None or os.fstat(self.body).st_size <= offset:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        fd = os.open(f"/proc/self/fd/{self.body}", os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(fd, offset, os.SEEK_SET)
        return fd

    def check_cancel(self) -> None:
        """Raises Failure(CANCELLED) when PID 1 has said so."""
        if has_cancel(self._channel):
            raise Failure(CANCELLED, "cancelled")


class Watch:
    """The limit of a file request; asked between two pieces of work."""

    def __init__(self, pipes: CallPipes, timeout_s: float) -> None:
        self._pipes = pipes
        self._timeout_s = timeout_s
        self._limit_at = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raises Failure(TIMEOUT) or Failure(CANCELLED)."""
        if time.monotonic() >= self._limit_at:
            raise Failure(TIMEOUT, f"not done after {self._timeout_s:g} s")
        self._pipes.check_cancel()


class RequestContext:
    """`watch.check()` is asked between two pieces of work; what the server opens its supervisor closes."""

    __slots__ = ("paths", "pipes", "watch")

    def __init__(self, paths: GuestPaths, pipes: CallPipes, watch: Watch) -> None:
        self.paths = paths
        self.pipes = pipes
        self.watch = watch

    @property
    def writer(self) -> ReportWriter:
        return self.pipes.writer

    @property
    def body(self) -> int | None:
        """A descriptor of the request's body, None when it has none."""
        return self.pipes.body


# --- The supervisor's side --------------------------------------------------------------------------------------------


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
            received = self._ends.receive()
            assignment = received if isinstance(received, Assignment) else None

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
        pipes = self._ends.open_call(assignment.body)
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


# --- PID 1's side -----------------------------------------------------------------------------------------------------


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
