"""Both ends of the pipes between PID 1 and a supervisor: a process that PID 1 forks to serve calls.

A socket carries calls and cancels to the supervisor. A pipe carries reports to PID 1. One byte of shared memory
(`Progress`) shows the state of the call, even after the supervisor was killed.
"""

from __future__ import annotations

# Import `_socket`: the module `socket` imports more code than the whole guest has, and PID 1 must stay small.
import _socket
import json
import mmap
import os
import select
import struct
import sys
import time

from guest.failures import CANCELLED, RequestFailure
from guest.fields import GuestRequest
from guest.kernel import WRITE_LATER, close_descriptors_except

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


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

    def __init__(self, request: GuestRequest, body: int | None, oom_kills: int | None) -> None:
        self.request = request
        self.body = body
        self.oom_kills = oom_kills


def open_channel() -> tuple[_socket.socket, _socket.socket]:
    """Open a socket pair. Return PID 1's end, which does not block, and the supervisor's end. Raises OSError."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def give(channel: _socket.socket, request: GuestRequest, body: int | None, oom_kills: int | None) -> bool:
    """Send a call to a supervisor. Return False if this is not possible.

    The reason is a request that is longer than one packet, or a supervisor that has stopped reading.
    """
    packet = json.dumps((request.OP, vars(request), oom_kills)).encode()
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
        close_descriptors_except(self.writer.fd, self.channel.fileno(), *kept_fds)

    def open_call(self, body: int | None) -> CallPipes:
        """Return the CallPipes of a call with that body."""
        return CallPipes(self, body)

    def receive(self, classes: Mapping[str, type[GuestRequest]]) -> Assignment | str | None:
        """Wait for the next message of PID 1. Return the next call, or CANCEL. `classes`: the requests by op.

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
        # PID 1 has checked the request. It sends the parsed fields.
        op, attributes, oom_kills = json.loads(packet)
        body = int.from_bytes(rights[0][2], sys.byteorder) if rights else None
        return Assignment(classes[op].restore(attributes), body, oom_kills)


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
