"""What PID 1 and a supervisor share: the channel on which a call and its cancel go down, the pipe on which reports come
up, and how far the call is.

A supervisor builds a `RequestContext` from its ends for the function that serves a file or search request.
"""

from __future__ import annotations

# Not `socket`, which imports more than all of the guest: PID 1 should stay small.
import _socket
import json
import mmap
import os
import select
import struct
import sys
import time

from guest.failures import CANCELLED, TIMEOUT, Failure
from guest.kernel import WRITE_LATER
from guest.requests import parse_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from guest.paths import GuestPaths
    from guest.requests import CallRequest

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


def take(channel: _socket.socket) -> Assignment | None:
    """Wait for the next call; None when PID 1 has closed its end, or a body could not be taken for want of
    descriptors.
    """
    heard = receive(channel)
    return heard if isinstance(heard, Assignment) else None


def receive(channel: _socket.socket) -> Assignment | str | None:
    """As `take`, for who may also be told CANCEL."""
    # Close-on-exec: the body is the supervisor's, programs are given their stdin only.
    packet, rights, flags, _ = channel.recvmsg(_MAX_PACKET, _socket.CMSG_LEN(_FD_BYTES), _socket.MSG_CMSG_CLOEXEC)
    if packet == _CANCEL_PACKET:
        return CANCEL
    if not packet or flags & _socket.MSG_CTRUNC:
        return None
    header, oom_kills = json.loads(packet)
    body = int.from_bytes(rights[0][2], sys.byteorder) if rights else None
    return Assignment(parse_call(header), body, oom_kills)


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
