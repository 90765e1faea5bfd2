"""The output pipes of one program. Output is counted; it is kept up to a limit, stored in a file, or sent while the
program runs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.call_pipes import ReportWriter
    from guest.commands.exec_request import ExecRequest
    from guest.paths import GuestPaths

QUOTA_BYTES = 67_108_864
"""Limit of all spill files of a session together, in bytes. Also the limit of a single file."""
COUNTED_BYTES = 8_388_608
"""Size up to which the lines of a file are counted. Counting the lines of a longer file costs as much as writing it.
"""
_PREFIX, _SUFFIX = b"command-", b".txt"


class Spill:
    """The complete output of a command. Above `limit_bytes` or `limit_lines`, it is stored in a file (the spill file).

    A spill never makes its command fail. When there is no space, the rest of the output is dropped and `is_whole` is
    false.
    """

    __slots__ = (
        "_fd",
        "_free_bytes",
        "_limit_bytes",
        "_limit_lines",
        "_output",
        "_pending",
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
        self._free_bytes = limit_bytes
        self.name: bytes | None = None
        self.lines = 0
        self.written = 0
        self.is_whole = True

    def add(self, data: bytes) -> None:
        """Store the next part of the output. Never raises OSError."""
        if self._pending is not None:
            self.lines += data.count(b"\n")
            self._pending.append(data)
            self._free_bytes -= len(data)
            if self._free_bytes < 0 or self.lines > self._limit_lines:
                self._begin(self._pending)
        elif self._fd is not None:
            self._write(data)

    def as_field(self) -> dict[str, object] | None:
        """Return the `spill` field of the done event: None when no file was needed or no file could be created."""
        if self.name is None:
            return None
        path = os.path.join(self._output, self.name).decode()
        lines = self.lines if self.written <= COUNTED_BYTES else None
        return {"path": path, "bytes": self.written, "lines": lines, "whole": self.is_whole}

    @property
    def is_missing(self) -> bool:
        """Return whether the output needed a file that could not be created."""
        return self._pending is None and self.name is None

    def _begin(self, pending: list[bytes]) -> None:
        """Create the file and write the pending output to the file."""
        self._pending = None
        self.lines = 0
        name = _PREFIX + os.urandom(4).hex().encode() + _SUFFIX
        # Programs of the sandbox can write to this folder. The random name, O_EXCL and O_NOFOLLOW prevent a write
        # through a file or link that a program has placed there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._free_bytes = QUOTA_BYTES - sum(size for _, size, _ in _list_spills(self._output))
        try:
            self._fd = os.open(os.path.join(self._output, name), flags, 0o600)
        except OSError:
            self.is_whole = False
            return
        self.name = name
        self._write(b"".join(pending))

    def _write(self, data: bytes) -> None:
        """Write to the file. While there is no space, remove files of older outputs. If data is lost, write nothing
        after it.
        """
        output, data = data, self._fit(data)
        view = memoryview(data)
        while view and self._fd is not None:
            try:
                count = os.write(self._fd, view)
            except OSError:
                # The file system is full. Remove only spill files: other files of the folder are needed.
                if self._drop_oldest():
                    continue
                self._stop()
                break
            view = view[count:]
        written = data[: len(data) - len(view)] if view else data
        self.written += len(written)
        if self.written <= COUNTED_BYTES:
            self.lines += written.count(b"\n")
        self._free_bytes -= len(written)
        if len(data) < len(output):
            # Write no later output, even if space becomes free: the file would have a gap.
            self._stop()

    def _fit(self, data: bytes) -> bytes:
        """Remove the oldest files until `data` fits into the quota. Return the part of `data` that fits."""
        while len(data) > self._free_bytes and self._drop_oldest():
            pass
        return data if len(data) <= self._free_bytes else data[: max(0, self._free_bytes)]

    def _drop_oldest(self) -> bool:
        """Remove the oldest file of another command. Return False when there is none."""
        spills = sorted(entry for entry in _list_spills(self._output) if entry[2] != self.name)
        for _, size, name in spills:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._output, name))
                self._free_bytes += size
                return True
        return False

    def _stop(self) -> None:
        """Write no more output to the file."""
        self.is_whole = False
        self._fd = None


def _list_spills(output: bytes) -> list[tuple[int, int, bytes]]:
    """Return (modification time in ns, size in bytes, name) of every spill file."""
    spills = []
    try:
        names = os.listdir(output)
    except OSError:
        return []
    for name in names:
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(output, name))
                if stat.S_ISREG(status.st_mode):
                    spills.append((status.st_mtime_ns, status.st_size, name))
    return spills


PACE_S = 0.05
"""Seconds between two frames of live output. Output within this time is sent as one frame, because each frame costs
processor time.
"""
PIECE_BYTES = 32_768
_FRAME_BYTES = 64
_STREAMS = {"stdout": "live", "stderr": "live_stderr", "merged": "live"}
READ_BYTES = 65_536
MANY_BYTES = 1_048_576
"""Largest pipe that the kernel gives an unprivileged process, and the largest read from such a pipe, in bytes."""
_F_SETPIPE_SZ = 1031
_PAUSE_S = 0.001
_LITTLE_BYTES = MANY_BYTES // 4
DRAIN_WINDOW_S = 0.25


class Capture:
    """The kept part of a stream: the first quarter of `cap` bytes and the last three quarters.

    The bytes between the two parts are counted and dropped. A stream of at most `cap` bytes is kept completely: its
    head and its tail then have no gap.
    """

    __slots__ = ("_end", "_head", "_head_cap", "_tail", "_tail_cap", "total")

    def __init__(self, cap: int) -> None:
        self._head_cap = cap // 4
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        # A ring buffer. When the ring is full, `_end` is the position of the oldest byte.
        self._tail = bytearray()
        self._end = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        """Store the next part of the stream."""
        self.total += len(data)
        free_bytes = self._head_cap - len(self._head)
        if free_bytes > 0:
            self._head += data[:free_bytes]
            data = data[free_bytes:]
        if data and self._tail_cap:
            self._add_to_tail(data[-self._tail_cap :])

    def _add_to_tail(self, data: bytes) -> None:
        free_bytes = self._tail_cap - len(self._tail)
        if free_bytes > 0:
            self._tail += data[:free_bytes]
            data = data[free_bytes:]
        first = min(len(data), self._tail_cap - self._end)
        self._tail[self._end : self._end + first] = data[:first]
        rest = len(data) - first
        self._tail[:rest] = data[first:]
        self._end = rest if rest else (self._end + first) % self._tail_cap

    def head(self) -> bytes:
        """Return the first kept bytes."""
        return bytes(self._head)

    def tail(self) -> bytes:
        """Return the last kept bytes."""
        return bytes(self._tail[self._end :] + self._tail[: self._end])

    def sizes(self) -> dict[str, int]:
        """Return the stream's entry in `streams` of the done event."""
        return {"total": self.total, "head": len(self._head), "tail": len(self._tail)}


class LiveFeed:
    """Output that is sent while the program runs: at most `max_bytes`, including the size of frame headers.

    Output beyond this limit, and output that arrives while PID 1 is busy, is counted and dropped.
    """

    __slots__ = ("_buffers", "_remaining", "_writer", "dropped", "due_at", "sent")

    def __init__(self, writer: ReportWriter, max_bytes: int) -> None:
        self._writer = writer
        self._remaining = max_bytes
        self._buffers: dict[str, bytearray] = {}
        self.due_at: float | None = None
        self.sent = 0
        self.dropped = 0

    def add(self, name: str, data: bytes, now: float) -> None:
        """Add a piece of output to the next frame."""
        if self.due_at is None:
            self.due_at = now + PACE_S
        buffer = self._buffers.setdefault(_STREAMS[name], bytearray())
        free_bytes = PIECE_BYTES - len(buffer)
        self.dropped += max(0, len(data) - free_bytes)
        if free_bytes > 0:
            buffer += data[:free_bytes]

    def flush(self, now: float, is_last: bool = False) -> None:
        """Send the output that is due. `is_last`: the program has ended, so send everything and wait while the pipe
        is full.
        """
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
        """Return the `live` field of the done event."""
        return {"sent": self.sent, "dropped": self.dropped}

    def _send(self, stream: str, data: bytes, is_last: bool) -> None:
        part = data[: max(0, self._remaining - _FRAME_BYTES)]
        self.dropped += len(data) - len(part)
        if not part:
            return
        self._remaining -= len(part) + _FRAME_BYTES
        self.sent += len(part)
        if is_last:
            self._writer.send(stream, part)
        else:
            self._writer.offer(stream, part)


class Outputs:
    """The output pipes of one program.

    If a request asks only for the stream `merged`, stdout and stderr share one pipe, which keeps the order of the
    program's writes. Otherwise there are two pipes, and `merged` contains their pieces in the order of arrival.
    """

    def __init__(self, request: ExecRequest, writer: ReportWriter, paths: GuestPaths) -> None:
        self._writer = writer
        self._live = LiveFeed(writer, request.live_bytes) if request.live_bytes else None
        self._spill = Spill(paths, *request.spill) if request.spill is not None else None
        # The number of bytes read from each pipe, until the pipe is enlarged.
        self._counts: dict[int, int] = {}
        self._large: set[int] = set()
        self._is_ahead = False
        self._remaining_stream_bytes = request.stream_bytes
        self._streamed = 0
        self._stream_total = 0
        self._captures = {name: Capture(cap) for name, cap in request.caps.items() if cap or name != "merged"}
        self._one_pipe = bool(request.caps.get("merged")) and not (request.caps["stdout"] or request.caps["stderr"])
        # Pipe -> name of the capture for its output.
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
        """Close this process's copies of the write ends. Call this after the program was started."""
        for fd in {self.stdout, self.stderr}:
            os.close(fd)

    def readable_fds(self) -> list[int]:
        """Return the pipes to read now. A pipe whose output is streamed is not read until PID 1 has read the last piece
        from this process.
        """
        blocked = self._remaining_stream_bytes is not None and self._writer.is_full
        return [fd for fd, name in self.open_fds.items() if not (blocked and name == "stdout")]

    def read(self, fd: int) -> bool:
        """Read one piece from a pipe. Return False when there is none. Close the pipe at its end."""
        try:
            data = os.read(fd, MANY_BYTES if fd in self._large else READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.open_fds[fd]
            return False
        self._count(fd, len(data))
        self._store(self.open_fds[fd], data)
        return True

    def pause(self) -> None:
        """Wait briefly, so that a program with much output fills its pipe. Many small reads would cost more processor
        time than the program.

        Do not wait after a large piece: the program fills the pipe quickly and would only be delayed.
        """
        if self._is_ahead:
            self._is_ahead = False
            time.sleep(_PAUSE_S)

    def _count(self, fd: int, count: int) -> None:
        if fd in self._large:
            self._is_ahead = count < _LITTLE_BYTES
        elif self._remaining_stream_bytes is None:
            self._counts[fd] = self._counts.get(fd, 0) + count
            if self._counts[fd] > MANY_BYTES:
                self._enlarge(fd)

    def _enlarge(self, fd: int) -> None:
        """Enlarge the pipe of a program with much output, so that fewer switches between the program and this process
        are needed.
        """
        self._large.add(fd)
        # Imported here, because most programs never fill a pipe.
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _F_SETPIPE_SZ, MANY_BYTES)

    @property
    def due_at(self) -> float | None:
        """Return the time at which `flush_live` must be called, or None."""
        return self._live.due_at if self._live is not None else None

    def flush_live(self) -> None:
        """Send the live output that is due, if the request asked for live output."""
        if self._live is not None:
            self._live.flush(time.monotonic())

    def drain(self) -> None:
        """Read the rest of the pipes, for at most DRAIN_WINDOW_S seconds.

        Do not wait for the end of the pipes: a process that survived the kill may still hold a pipe open.
        """
        give_up_at = time.monotonic() + DRAIN_WINDOW_S
        while time.monotonic() < give_up_at:
            # PID 1 may not have read the last piece of a stream yet, and the streamed pipe waits for this. Such waiting
            # time does not count towards the limit.
            give_up_at += self._writer.finish()
            received = [self.read(fd) for fd in self.readable_fds()]
            if not any(received):
                return

    def send(self) -> None:
        """Send the kept heads and tails."""
        if self._live is not None:
            self._live.flush(time.monotonic(), is_last=True)
        for name, capture in self._captures.items():
            self._writer.send(name, capture.head())
            self._writer.send(name, capture.tail())

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the `streams` field of the done event."""
        sizes = {name: capture.sizes() for name, capture in self._captures.items()}
        if self._one_pipe:
            # Stdout and stderr share one pipe, so their separate sizes are unknown.
            return {"merged": sizes["merged"]}
        if self._remaining_stream_bytes is not None:
            sizes["stdout"] = {"total": self._stream_total, "head": self._streamed, "tail": 0}
        return sizes

    def extras(self) -> dict[str, object]:
        """Return the `spill` and `live` fields of the done event, if the request asked for them."""
        fields: dict[str, object] = {}
        if self._spill is not None:
            fields["spill"] = self._spill.as_field()
            fields["spill_failed"] = self._spill.is_missing
        if self._live is not None:
            fields["live"] = self._live.sizes()
        return fields

    def _store(self, name: str, data: bytes) -> None:
        if self._live is not None:
            self._live.add(name, data, time.monotonic())
        if self._spill is not None:
            self._spill.add(data)
        if name == "stdout" and self._remaining_stream_bytes is not None:
            self._stream(data)
            return
        self._captures[name].add(data)
        merged = self._captures.get("merged")
        if merged is not None and name != "merged":
            merged.add(data)

    def _stream(self, data: bytes) -> None:
        self._stream_total += len(data)
        part = data[: self._remaining_stream_bytes]
        if part and self._remaining_stream_bytes is not None:
            self._remaining_stream_bytes -= len(part)
            self._streamed += len(part)
            self._writer.offer("stdout", part)
