"""Writes the file of one trace. Lines are collected and written at least once per second. A full disk loses lines but
never ends the run.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

FLUSH_S = 1.0
MAX_GATHERED_BYTES = 64 * 1024
TAIL_BYTES = 32 * 1024 * 1024
"""Length of the end of a file that is searched for the last complete line. A line with long messages has megabytes."""


class TraceWriter:
    """Appends lines to `path`.

    `lost_lines` is the number of lines that could not be written. At the first failure, `on_failure` receives a
    sentence. The file is opened for each write, so that a thousand parallel runs do not need a thousand open
    descriptors.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None]) -> None:
        self.path = path
        self.lost_lines = 0
        self._on_failure = on_failure
        self._has_failed = False
        self._lines: list[bytes] = []
        self._bytes = 0
        self._gathered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # An earlier writer may have died in the middle of a line. A newline then ends the incomplete line.
        self._is_torn = _is_torn(path)

    def add(self, line: bytes) -> None:
        """Add one line without a newline."""
        if not self._lines:
            self._gathered_at = time.monotonic()
            self._wake_later()
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= MAX_GATHERED_BYTES or time.monotonic() - self._gathered_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the collected lines. Lines that cannot be written are lost and counted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines, self._bytes = self._lines, [], 0
        if not lines:
            return
        try:
            self.lost_lines += len(lines) - self._append(lines)
        except OSError as error:
            self.lost_lines += len(lines)
            self.report_failure(error)

    def report_failure(self, error: OSError) -> None:
        """Report the first failure."""
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(
                f"the trace {self.path} cannot be written ({error.strerror or error}). The run continues, and lost "
                "lines are counted: free disk space, or set TOOLCREW_TRACES to another folder"
            )

    def _append(self, lines: list[bytes]) -> int:
        """Append the lines. Return how many lines were written completely."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_NOFOLLOW: a symbolic link must not redirect the trace to another file.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            head = b"\n" if self._is_torn else b""
            data = head + b"".join(line + b"\n" for line in lines)
            written = 0
            while written < len(data):
                try:
                    written += os.write(descriptor, data[written:])
                except OSError as error:
                    self.report_failure(error)
                    break
        finally:
            os.close(descriptor)
        if written:
            self._is_torn = not data[:written].endswith(b"\n")
        return len(lines) if written == len(data) else max(0, data[len(head) : written].count(b"\n"))

    def _wake_later(self) -> None:
        """Schedule a flush."""
        # Without an event loop, the next line checks the clock, and `flush` at the end writes the rest.
        with contextlib.suppress(RuntimeError):
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)


def read_last_lines(path: Path) -> list[bytes]:
    """Return the complete lines at the end of a file; no lines if the file does not exist."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [line for line in (lines[1:-1] if size > TAIL_BYTES else lines[:-1]) if line]


def _is_torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
