"""The output pipes of one program: read, counted, kept up to the caps or sent on as they come."""

from __future__ import annotations

import os
import time

from guest.capture import Capture

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.exec_requests import ExecRequest
    from guest.reports import ReportWriter

READ_BYTES = 65_536
DRAIN_WINDOW_S = 0.25


class Outputs:
    """Who asks for `merged` alone gets one pipe for stdout and stderr, which keeps the order of the program's own writes.

    Otherwise there are two, and `merged` has their pieces in the order of arrival.
    """

    def __init__(self, request: ExecRequest, writer: ReportWriter) -> None:
        self._writer = writer
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
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.open_fds[fd]
            return False
        self._keep(self.open_fds[fd], data)
        return True

    def drain(self) -> None:
        """Take what is in the pipes. Who still holds them is not waited for, nor heard for more than the window."""
        give_up_at = time.monotonic() + DRAIN_WINDOW_S
        while time.monotonic() < give_up_at:
            took = [self.read(fd) for fd in self.readable_fds()]
            if not any(took):
                return

    def send(self) -> None:
        """Send the heads and tails that were kept."""
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

    def _keep(self, name: str, data: bytes) -> None:
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
