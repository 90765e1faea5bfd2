"""The output pipes of one program: read, counted, kept up to the caps, or sent on while the program runs."""

from __future__ import annotations

import contextlib
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths
    from guest.requests import ExecRequest
    from guest.supervisors import ReportWriter

QUOTA_BYTES = 67_108_864
"""Of all spill files of a session together, and so of one."""
COUNTED_BYTES = 8_388_608
"""Of a longer file the lines are not counted: that would cost as much as writing it."""
_PREFIX, _SUFFIX = b"command-", b".txt"


class Spill:
    """Takes all that a command prints. Up to `limit_bytes` and `limit_lines` it is only remembered, beyond that it lies
    in a file.

    It never fails its command: where there is no room the rest is not kept, which `is_whole` tells.
    """

    __slots__ = (
        "_fd",
        "_limit_bytes",
        "_limit_lines",
        "_output",
        "_pending",
        "_room",
        "is_whole",
        "lines",
        "name",
        "written",
    )

    def __init__(self, paths: GuestPaths, limit_bytes: int, limit_lines: int) -> None:
        self._output = paths.output
        self._limit_bytes = limit_bytes
        self._limit_lines = limit_lines
        self._pending: list[bytes] | None = []
        self._fd: int | None = None
        self._room = limit_bytes
        self.name: bytes | None = None
        self.lines = 0
        self.written = 0
        self.is_whole = True

    def add(self, data: bytes) -> None:
        if self._pending is not None:
            self.lines += data.count(b"\n")
            self._pending.append(data)
            self._room -= len(data)
            if self._room < 0 or self.lines > self._limit_lines:
                self._begin(self._pending)
        elif self._fd is not None:
            self._write(data)

    def as_field(self) -> dict[str, object] | None:
        """`spill` of the done event: None when no file was needed, or none could be made."""
        if self.name is None:
            return None
        path = os.path.join(self._output, self.name).decode()
        lines = self.lines if self.written <= COUNTED_BYTES else None
        return {"path": path, "bytes": self.written, "lines": lines, "whole": self.is_whole}

    @property
    def is_missing(self) -> bool:
        """Whether a file was needed and could not be made."""
        return self._pending is None and self.name is None

    def _begin(self, pending: list[bytes]) -> None:
        self._pending = None
        self.lines = 0
        name = _PREFIX + os.urandom(4).hex().encode() + _SUFFIX
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._room = QUOTA_BYTES - sum(size for _, size, _ in _list_spills(self._output))
        try:
            self._fd = os.open(os.path.join(self._output, name), flags, 0o600)
        except OSError:
            self.is_whole = False
            return
        self.name = name
        self._write(b"".join(pending))

    def _write(self, data: bytes) -> None:
        whole, data = data, self._fit(data)
        view = memoryview(data)
        while view and self._fd is not None:
            try:
                count = os.write(self._fd, view)
            except OSError:
                # The place for outputs is full: of what else lies there only spills are ours to drop.
                if self._drop_oldest():
                    continue
                self._stop()
                break
            view = view[count:]
        done = data[: len(data) - len(view)] if view else data
        self.written += len(done)
        if self.written <= COUNTED_BYTES:
            self.lines += done.count(b"\n")
        self._room -= len(done)
        if len(data) < len(whole):
            # Room that others leave later is not for what comes then: it would follow a gap.
            self._stop()

    def _fit(self, data: bytes) -> bytes:
        """The part of `data` that the quota has room for, once older files have made way."""
        while len(data) > self._room and self._drop_oldest():
            pass
        return data if len(data) <= self._room else data[: max(0, self._room)]

    def _drop_oldest(self) -> bool:
        spills = sorted(entry for entry in _list_spills(self._output) if entry[2] != self.name)
        for _, size, name in spills:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._output, name))
                self._room += size
                return True
        return False

    def _stop(self) -> None:
        self.is_whole = False
        self._fd = None


def _list_spills(output: bytes) -> list[tuple[int, int, bytes]]:
    """When each was last written, its size, its name."""
    found = []
    try:
        names = os.listdir(output)
    except OSError:
        return []
    for name in names:
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(output, name))
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, status.st_size, name))
    return found


PACE_S = 0.05
"""Pieces that come closer together than this are sent as one: each costs a frame."""
PIECE_BYTES = 32_768
_FRAME_BYTES = 64
_STREAMS = {"stdout": "live", "stderr": "live_stderr", "merged": "live"}
READ_BYTES = 65_536
MANY_BYTES = 1_048_576
"""The most the kernel gives an unprivileged pipe, and what is read of it at once."""
_F_SETPIPE_SZ = 1031
_PAUSE_S = 0.001
_LITTLE_BYTES = MANY_BYTES // 4
DRAIN_WINDOW_S = 0.25


class Capture:
    """The first quarter of `cap` bytes and the last three quarters; what lies between is counted and dropped.

    A stream of at most `cap` bytes is kept whole, as head and tail that join.
    """

    __slots__ = ("_end", "_head", "_head_cap", "_tail", "_tail_cap", "total")

    def __init__(self, cap: int) -> None:
        self._head_cap = cap // 4
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        # A ring: once it is full, `_end` is where the oldest byte is overwritten.
        self._tail = bytearray()
        self._end = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_cap:
            self._add_to_tail(data[-self._tail_cap :])

    def _add_to_tail(self, data: bytes) -> None:
        room = self._tail_cap - len(self._tail)
        if room > 0:
            self._tail += data[:room]
            data = data[room:]
        first = min(len(data), self._tail_cap - self._end)
        self._tail[self._end : self._end + first] = data[:first]
        rest = len(data) - first
        self._tail[:rest] = data[first:]
        self._end = rest if rest else (self._end + first) % self._tail_cap

    def head(self) -> bytes:
        return bytes(self._head)

    def tail(self) -> bytes:
        return bytes(self._tail[self._end :] + self._tail[: self._end])

    def sizes(self) -> dict[str, int]:
        """The entry of `done`'s streams."""
        return {"total": self.total, "head": len(self._head), "tail": len(self._tail)}


class LiveFeed:
    """`most_bytes` are what may be sent, frames included. What does not fit, or comes while PID 1 is busy, is counted
    and dropped.
    """

    __slots__ = ("_buffers", "_left", "_writer", "dropped", "due_at", "sent")

    def __init__(self, writer: ReportWriter, most_bytes: int) -> None:
        self._writer = writer
        self._left = most_bytes
        self._buffers: dict[str, bytearray] = {}
        self.due_at: float | None = None
        self.sent = 0
        self.dropped = 0

    def add(self, name: str, data: bytes, now: float) -> None:
        if self.due_at is None:
            self.due_at = now + PACE_S
        buffer = self._buffers.setdefault(_STREAMS[name], bytearray())
        room = PIECE_BYTES - len(buffer)
        self.dropped += max(0, len(data) - room)
        if room > 0:
            buffer += data[:room]

    def flush(self, now: float, is_last: bool = False) -> None:
        """Send what is due. `is_last`: all of it, waiting where it must: the program has ended."""
        if self.due_at is None or (now < self.due_at and not is_last):
            return
        for stream, buffer in list(self._buffers.items()):
            if self._writer.is_full and not is_last:
                self.due_at = now + PACE_S
                return
            self._send(stream, bytes(buffer), is_last)
            del self._buffers[stream]
        self.due_at = None

    def sizes(self) -> dict[str, int]:
        """`live` of the done event."""
        return {"sent": self.sent, "dropped": self.dropped}

    def _send(self, stream: str, data: bytes, is_last: bool) -> None:
        part = data[: max(0, self._left - _FRAME_BYTES)]
        self.dropped += len(data) - len(part)
        if not part:
            return
        self._left -= len(part) + _FRAME_BYTES
        self.sent += len(part)
        if is_last:
            self._writer.send(stream, part)
        else:
            self._writer.offer(stream, part)


class Outputs:
    """Who asks for `merged` alone gets one pipe for stdout and stderr, which keeps the order of the program's own
    writes.

    Otherwise there are two, and `merged` has their pieces in the order of arrival.
    """

    def __init__(self, request: ExecRequest, writer: ReportWriter, paths: GuestPaths) -> None:
        self._writer = writer
        self._live = LiveFeed(writer, request.live_bytes) if request.live_bytes else None
        self._spill = Spill(paths, *request.spill) if request.spill is not None else None
        # Bytes read of each pipe until it was enlarged.
        self._counts: dict[int, int] = {}
        self._large: set[int] = set()
        self._is_ahead = False
        self._stream_left = request.stream_bytes
        self._streamed = 0
        self._stream_total = 0
        self._captures = {name: Capture(cap) for name, cap in request.caps.items() if cap or name != "merged"}
        self._one_pipe = bool(request.caps.get("merged")) and not (request.caps["stdout"] or request.caps["stderr"])
        # Where what arrives on a pipe is kept: its own capture and, if asked for, the merged one.
        self.open_fds: dict[int, str] = {}
        read_fd, self.stdout = os.pipe()
        self._add_pipe(read_fd, "merged" if self._one_pipe else "stdout")
        self.stderr = self.stdout
        if not self._one_pipe:
            read_fd, self.stderr = os.pipe()
            self._add_pipe(read_fd, "stderr")

    def _add_pipe(self, read_fd: int, name: str) -> None:
        os.set_blocking(read_fd, False)
        self.open_fds[read_fd] = name

    def close_write_ends(self) -> None:
        for fd in {self.stdout, self.stderr}:
            os.close(fd)

    def readable_fds(self) -> list[int]:
        """The pipes to read now: a stream waits until PID 1 has taken its last piece."""
        blocked = self._stream_left is not None and self._writer.is_full
        return [fd for fd, name in self.open_fds.items() if not (blocked and name == "stdout")]

    def read(self, fd: int) -> bool:
        """Take one piece from a pipe; False when there was none. A pipe that has ended is closed."""
        try:
            data = os.read(fd, MANY_BYTES if fd in self._large else READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.open_fds[fd]
            return False
        self._note(fd, len(data))
        self._keep(self.open_fds[fd], data)
        return True

    def pause(self) -> None:
        """Let a program that prints much fill its pipe: many small pieces cost more than the program itself.

        Not when the last piece was large: it prints faster than it is read, and would only wait.
        """
        if self._is_ahead:
            self._is_ahead = False
            time.sleep(_PAUSE_S)

    def _note(self, fd: int, count: int) -> None:
        if fd in self._large:
            self._is_ahead = count < _LITTLE_BYTES
        elif self._stream_left is None:
            self._counts[fd] = self._counts.get(fd, 0) + count
            if self._counts[fd] > MANY_BYTES:
                self._enlarge(fd)

    def _enlarge(self, fd: int) -> None:
        """A program that prints much gets a pipe for much: it and this process then wait less for each other."""
        self._large.add(fd)
        # Only here: most programs never fill a pipe.
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _F_SETPIPE_SZ, MANY_BYTES)

    @property
    def due_at(self) -> float | None:
        """When `flush_live` wants to be called, whatever comes."""
        return self._live.due_at if self._live is not None else None

    def flush_live(self) -> None:
        """Send what is due to who watches, if anybody does."""
        if self._live is not None:
            self._live.flush(time.monotonic())

    def drain(self) -> None:
        """Take what is in the pipes. Who still holds them is not waited for, nor heard for more than the window."""
        give_up_at = time.monotonic() + DRAIN_WINDOW_S
        while time.monotonic() < give_up_at:
            # PID 1 may not have taken the last piece of a stream yet: its pipe is not read until then, and is not empty
            # for that.
            give_up_at += self._writer.finish()
            took = [self.read(fd) for fd in self.readable_fds()]
            if not any(took):
                return

    def send(self) -> None:
        """Send the heads and tails that were kept."""
        if self._live is not None:
            self._live.flush(time.monotonic(), is_last=True)
        for name, capture in self._captures.items():
            self._writer.send(name, capture.head())
            self._writer.send(name, capture.tail())

    def sizes(self) -> dict[str, dict[str, int]]:
        """`streams` of the done event."""
        sizes = {name: capture.sizes() for name, capture in self._captures.items()}
        if self._one_pipe:
            # What of the one pipe came by which descriptor nobody can tell.
            return {"merged": sizes["merged"]}
        if self._stream_left is not None:
            sizes["stdout"] = {"total": self._stream_total, "head": self._streamed, "tail": 0}
        return sizes

    def extras(self) -> dict[str, object]:
        """`spill` and `live` of the done event, as far as they were asked for."""
        fields: dict[str, object] = {}
        if self._spill is not None:
            fields["spill"] = self._spill.as_field()
            fields["spill_failed"] = self._spill.is_missing
        if self._live is not None:
            fields["live"] = self._live.sizes()
        return fields

    def _keep(self, name: str, data: bytes) -> None:
        if self._live is not None:
            self._live.add(name, data, time.monotonic())
        if self._spill is not None:
            self._spill.add(data)
        if name == "stdout" and self._stream_left is not None:
            self._stream(data)
            return
        self._captures[name].add(data)
        merged = self._captures.get("merged")
        if merged is not None and name != "merged":
            merged.add(data)

    def _stream(self, data: bytes) -> None:
        self._stream_total += len(data)
        part = data[: self._stream_left]
        if part and self._stream_left is not None:
            self._stream_left -= len(part)
            self._streamed += len(part)
            self._writer.offer("stdout", part)
