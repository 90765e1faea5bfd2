"""The log of a background job: a file of limited size. A full file is replaced by its own second half."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

LOG_BYTES = 4_194_304


class JobLog:
    """The log file of one job.

    Positions count from the first byte of the job's output. `written`: number of bytes that were written to the file so
    far. Bytes before position `_base` have since been removed from the file. `dropped` counts them and the bytes that
    could not be written. Only the constructor raises OSError.
    """

    def __init__(self, paths: GuestPaths, job: str, max_bytes: int = LOG_BYTES) -> None:
        self.path = paths.job_log(job)
        folder, name = os.path.split(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        self._directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._name = name.encode()
        self._max_bytes = max_bytes
        self._fd = self._create(self._name)
        self._skip = 0
        self._base = 0
        self._failed_bytes = 0
        self.written = 0

    @property
    def dropped(self) -> int:
        """Return the number of bytes that are not in the file."""
        return self._base + self._failed_bytes

    def add(self, data: bytes) -> None:
        """Write output of the job to the file. Never fails: bytes that do not fit are counted."""
        if self.written - self._base + len(data) > self._max_bytes:
            self._rotate()
        view = memoryview(data)
        try:
            while view:
                count = os.write(self._fd, view)
                self.written += count
                view = view[count:]
        except OSError:
            self._failed_bytes += len(view)

    def read(self, start: int, max_bytes: int) -> tuple[bytes, bytes]:
        """Return the output from position `start` on, as head and tail, at most `max_bytes` bytes.

        Longer output is cut: the head gets a quarter of `max_bytes`, and the tail three quarters.
        """
        head_bytes = max_bytes // 4
        if self.written - start <= max_bytes and start >= self._base:
            return self._pread(start, self.written - start), b""
        head = self._pread(start, head_bytes) if start >= self._base else b""
        tail_from = max(self.written - (max_bytes - head_bytes), self._base, start)
        return head, self._pread(tail_from, self.written - tail_from)

    def _pread(self, start: int, size: int) -> bytes:
        at, parts = self._skip + start - self._base, []
        try:
            while size > 0 and (part := os.pread(self._fd, size, at)):
                parts.append(part)
                at, size = at + len(part), size - len(part)
        except OSError:
            # Return what is there: a program of the sandbox has changed the file, which is allowed because the file
            # belongs to the session.
            return b"".join(parts)
        return b"".join(parts)

    def _rotate(self) -> None:
        """Replace the file by a notice and the second half of the output."""
        keep_from = max(self._base, self.written - self._max_bytes // 2)
        tail = self._pread(keep_from, self.written - keep_from)
        notice = f"[... {keep_from} bytes of earlier output were dropped ...]\n".encode()
        temporary = b"." + self._name
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._directory)
            fd = self._create(temporary)
            self._write_all(fd, notice + tail)
            # The rename replaces the file in one step, so that a program that reads the log never finds half a file.
            os.rename(temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            # There is no space for a second file, so empty the first one.
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
