"""The log of a background job: a file of bounded size that begins anew, with its own second half, when it is full."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

LOG_BYTES = 4_194_304


class JobLog:
    """Counts on one axis: `written` bytes came and were kept at first, those before `_base` have been dropped since.

    `dropped` tells of both those and what found no room at all. Raises OSError from the constructor only.
    """

    def __init__(self, paths: GuestPaths, job: str, most_bytes: int = LOG_BYTES) -> None:
        folder = paths.output + b"/jobs"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        self._directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._name = job.encode() + b".log"
        self.path = f"{folder.decode()}/{job}.log"
        self._most = most_bytes
        self._fd = self._create(self._name)
        self._skip = 0
        self._base = 0
        self._refused = 0
        self.written = 0

    @property
    def dropped(self) -> int:
        return self._base + self._refused

    def add(self, data: bytes) -> None:
        """Keep what a job has printed. Never fails: what finds no room is counted."""
        if self.written - self._base + len(data) > self._most:
            self._begin_anew()
        view = memoryview(data)
        try:
            while view:
                count = os.write(self._fd, view)
                self.written += count
                view = view[count:]
        except OSError:
            self._refused += len(view)

    def read(self, start: int, most: int) -> tuple[bytes, bytes]:
        """Of what came from `start` on: all of it, or its first quarter and last three of `most` bytes."""
        head_bytes = most // 4
        if self.written - start <= most and start >= self._base:
            return self._pread(start, self.written - start), b""
        head = self._pread(start, head_bytes) if start >= self._base else b""
        tail_from = max(self.written - (most - head_bytes), self._base, start)
        return head, self._pread(tail_from, self.written - tail_from)

    def _pread(self, start: int, size: int) -> bytes:
        at, parts = self._skip + start - self._base, []
        try:
            while size > 0 and (part := os.pread(self._fd, size, at)):
                parts.append(part)
                at, size = at + len(part), size - len(part)
        except OSError:
            # A program of the sandbox has done something to the file: it is the session's own.
            return b"".join(parts)
        return b"".join(parts)

    def _begin_anew(self) -> None:
        keep_from = max(self._base, self.written - self._most // 2)
        kept = self._pread(keep_from, self.written - keep_from)
        notice = f"[... {keep_from} bytes of earlier output were dropped ...]\n".encode()
        temporary = b"." + self._name
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._directory)
            fd = self._create(temporary)
            self._write_all(fd, notice + kept)
            os.rename(temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            # No room for a second file: the first gives up all that it has.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            self._skip, self._base = 0, self.written
            return
        os.close(self._fd)
        self._fd, self._skip, self._base = fd, len(notice), keep_from

    def _create(self, name: bytes) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory)

    @staticmethod
    def _write_all(fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
