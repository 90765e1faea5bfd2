"""The supervisors: the processes that PID 1 forks to serve calls.

Invariant: PID 1 knows the state of every call, even after a program of the sandbox stops or kills the call's
supervisor. Every call gets exactly one done event. A call is given to another supervisor only if its first supervisor
did nothing for the call.

PID 1 and a supervisor share three things. A socket carries calls and cancels to the supervisor. A pipe carries reports
to PID 1. One byte of shared memory (`Progress`) shows the state of the call, even after the supervisor was killed.

For a file or search request, a supervisor builds a `RequestContext` from its ends of the pipes.
"""

from __future__ import annotations

# Import `_socket`: the module `socket` imports more code than the whole guest has, and PID 1 must stay small.
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
from guest.failures import CANCELLED, INTERNAL, TIMEOUT, RequestFailure, describe_os_error
from guest.fields import printable
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
"""Time that a supervisor waits for its next call, in seconds. A sandbox at rest consists of PID 1 alone."""
TAKE_S = 0.3
"""Time limit for a waiting supervisor to take a call, in seconds. The limit is longer than a scheduling delay on a
busy host, and small compared with the time limit of a call.
"""
_READ_BYTES = 65_536
_SENT, _TAKEN, _SETTLED = range(3)
STREAMS = ("stdout", "stderr", "merged", "file", "live", "live_stderr", "lines", "found")
DONE = 255
"""Kind of the record that ends a call. The supervisor serves no further call."""
DONE_AND_FREE = 254
"""Kind of the record that ends a call. The supervisor waits for its next call."""
FACTS = 253
"""Kind of the record in which the keeper of a job reports the state of the job, without a request."""
CHUNK_BYTES = 65_536
_RECORD = struct.Struct(">BI")
_MAX_PACKET = 65_536
_FD_BYTES = 4
_CANCEL_PACKET = b"c"
CANCEL = "cancel"
_MAX_FDS = 4096


class Progress:
    """State of the current call: given, taken or settled.

    The state is one byte of memory that PID 1 and the supervisor share. PID 1 can read the state after the supervisor
    was killed. Reading it is also possible while the report pipe is full of output that the host does not read.
    """

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def reset(self) -> None:
        """Set the state to given: PID 1 sends a call, and the supervisor has not begun to serve it."""
        self._memory[0] = _SENT

    def take(self) -> None:
        """Set the state to taken: from here on, the call may have had effects."""
        self._memory[0] = _TAKEN

    def settle(self) -> None:
        """Set the state to settled: no process of the call runs any more."""
        self._memory[0] = _SETTLED

    @property
    def is_taken(self) -> bool:
        """Return whether the supervisor has begun to serve the call."""
        return self._memory[0] != _SENT

    @property
    def is_settled(self) -> bool:
        """Return whether no process of the call runs any more."""
        return self._memory[0] == _SETTLED


class ReportWriter:
    """The supervisor's end of the report pipe.

    It does not block: while a program runs, the supervisor must monitor the program and must not wait for PID 1.
    """

    __slots__ = ("_pending", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending = memoryview(b"")

    @property
    def is_full(self) -> bool:
        """Return whether a part of the piece that was last offered is not sent yet."""
        return len(self._pending) > 0

    def offer(self, stream: str, data: bytes) -> None:
        """Start to send one piece of at most CHUNK_BYTES. Call this only while `is_full` is false."""
        self._pending = memoryview(_RECORD.pack(STREAMS.index(stream), len(data)) + data)
        self.flush()

    def flush(self) -> None:
        """Send as much of the pending piece as the pipe accepts now. Raises OSError when the pipe is broken."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self.fd, self._pending) :]
        except OSError as error:
            if error.errno not in WRITE_LATER:
                raise

    def finish(self) -> float:
        """Wait until the pending piece is sent. Return the waiting time in seconds."""
        started = time.monotonic()
        self._write_all(self._pending)
        self._pending = memoryview(b"")
        return time.monotonic() - started

    def send(self, stream: str, data: bytes) -> None:
        """Send all of `data` in records of at most CHUNK_BYTES. Wait while the pipe is full."""
        view = memoryview(data)
        for at in range(0, len(data), CHUNK_BYTES):
            self._send_record(STREAMS.index(stream), view[at : at + CHUNK_BYTES])

    def send_done(self, fields: dict[str, object], is_free: bool) -> None:
        """Send the fields of the call's done event. `is_free`: the supervisor waits for its next call."""
        self._send_record(DONE_AND_FREE if is_free else DONE, json.dumps(fields).encode())

    def send_facts(self, facts: dict[str, object]) -> None:
        """Send the state of a job to PID 1, outside of any request."""
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
    """PID 1's end of the report pipe. Collects bytes into records and buffers at most one incomplete record."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add the bytes that were read. Return the records that are now complete, as (kind, payload)."""
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
    """A call, as its supervisor receives the call.

    `body` is a descriptor, or None when the request has no body. `oom_kills` is the value of the cgroup's OOM counter
    at the start of the call, or None.
    """

    __slots__ = ("body", "oom_kills", "request")

    def __init__(self, request: CallRequest, body: int | None, oom_kills: int | None) -> None:
        self.request = request
        self.body = body
        self.oom_kills = oom_kills


def open_channel() -> tuple[_socket.socket, _socket.socket]:
    """Open a socket pair. Return PID 1's end, which does not block, and the supervisor's end. Raises OSError."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def give(channel: _socket.socket, header: Mapping[str, object], body: int | None, oom_kills: int | None) -> bool:
    """Send a call to a supervisor. Return False if this is not possible.

    The reason is a header that is longer than one packet, or a supervisor that has stopped reading.
    """
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
    """Send a cancel to the supervisor."""
    try:
        channel.send(_CANCEL_PACKET)
    except OSError:
        # The supervisor has ended. PID 1's loop learns this from the report pipe.
        return


def has_cancel(channel: _socket.socket) -> bool:
    """Return whether PID 1 has sent a message. During a call, a message can only be a cancel.

    A closed channel also counts as a cancel.
    """
    try:
        channel.recv(1, _socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


class SupervisorEnds:
    """The supervisor's ends of the report pipe and of the channel to PID 1, and the shared progress."""

    __slots__ = ("channel", "progress", "writer")

    def __init__(self, writer: ReportWriter, channel: _socket.socket, progress: Progress) -> None:
        self.writer = writer
        self.channel = channel
        self.progress = progress

    def close_all_others(self, *kept_fds: int | None) -> None:
        """Close every descriptor from 3 upwards, except for these ends and `kept_fds`."""
        low = 2
        for fd in sorted(fd for fd in (self.writer.fd, self.channel.fileno(), *kept_fds) if fd is not None):
            os.closerange(low + 1, fd)
            low = fd
        os.closerange(low + 1, _MAX_FDS)

    def open_call(self, body: int | None) -> CallPipes:
        """Return the CallPipes of a call with that body."""
        return CallPipes(self, body)

    def receive(self) -> Assignment | str | None:
        """Wait for the next message of PID 1. Return the next call, or CANCEL.

        Return None when PID 1 has closed its end, or when no descriptor is free for the body.
        """
        # Close the descriptor on exec: only the supervisor may have the body. A program gets only its stdin.
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
    """What the supervisor needs for one call: its ends of the pipes to PID 1, and the call's body."""

    __slots__ = ("_channel", "_progress", "body", "control", "writer")

    def __init__(self, ends: SupervisorEnds, body: int | None) -> None:
        self.writer = ends.writer
        self.control = ends.channel.fileno()
        self.body = body
        self._channel = ends.channel
        self._progress = ends.progress

    def settle(self) -> None:
        """Tell PID 1 that no process of the call runs any more, so that PID 1 does not kill this supervisor at the
        limit.
        """
        self._progress.settle()

    def read_body(self, size: int) -> bytes:
        """Return the first `size` bytes of the body."""
        return os.pread(self.body, size, 0) if self.body is not None and size else b""

    def open_stdin(self, offset: int) -> int:
        """Open the rest of the body, from `offset` on, for reading. Open /dev/null when there is no rest."""
        if self.body is None or os.fstat(self.body).st_size <= offset:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        fd = os.open(f"/proc/self/fd/{self.body}", os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(fd, offset, os.SEEK_SET)
        return fd

    def check_cancel(self) -> None:
        """Raise RequestFailure(CANCELLED) when PID 1 has cancelled the call."""
        if has_cancel(self._channel):
            raise RequestFailure(CANCELLED, "cancelled")


class Watch:
    """The time limit of a file request. The function that serves the request calls `check` between two pieces of
    work.
    """

    def __init__(self, pipes: CallPipes, timeout_s: float) -> None:
        self._pipes = pipes
        self._timeout_s = timeout_s
        self._limit_at = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raise RequestFailure(TIMEOUT) after the time limit, and RequestFailure(CANCELLED) after a cancel."""
        if time.monotonic() >= self._limit_at:
            raise RequestFailure(TIMEOUT, f"not done after {self._timeout_s:g} s")
        self._pipes.check_cancel()


class RequestContext:
    """The objects that the function that serves a file or search request may use.

    The function calls `watch.check()` between two pieces of work. The supervisor closes all descriptors that the
    function opens.
    """

    __slots__ = ("paths", "pipes", "watch")

    def __init__(self, paths: GuestPaths, pipes: CallPipes, watch: Watch) -> None:
        self.paths = paths
        self.pipes = pipes
        self.watch = watch

    @property
    def writer(self) -> ReportWriter:
        """Return the supervisor's end of the report pipe."""
        return self.pipes.writer

    @property
    def body(self) -> int | None:
        """Return a descriptor of the request's body, or None when the request has no body."""
        return self.pipes.body


# --- The supervisor's side --------------------------------------------------------------------------------------------


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
            received = self._ends.receive()
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
        return load_server(request)(request, RequestContext(self._paths, pipes, Watch(pipes, request.timeout_s)))


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


# --- PID 1's side -----------------------------------------------------------------------------------------------------


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
        if not give(self._channel, call.header, call.body.fd, call.oom_kills):
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
