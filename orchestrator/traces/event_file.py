"""Writes a file of events. Lines are collected and written at least once per second. A full disk loses lines but never
ends the work.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path

from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

FLUSH_S = 1.0
MAX_GATHERED_BYTES = 64 * 1024


class EventFile:
    """Appends lines to `path`. The first failure is logged.

    The file is opened for each write, so that a thousand parallel runs do not need a thousand open descriptors.
    """

    def __init__(self, path: Path, *, has_partial_line: bool = False) -> None:
        """Append to the file at `path`. `has_partial_line`: an earlier writer died in the middle of a line. A
        newline then ends the incomplete line.
        """
        self.path = path
        self._has_partial_line = has_partial_line
        self._has_failed = False
        self._lines: list[bytes] = []
        self._bytes = 0
        self._gathered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: bytes) -> None:
        """Add one line, given without its newline."""
        if not self._lines:
            self._gathered_at = time.monotonic()
            # Without an event loop, the next line checks the clock, and `flush` at the end writes the rest.
            with contextlib.suppress(RuntimeError):
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= MAX_GATHERED_BYTES or time.monotonic() - self._gathered_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the collected lines. Lines that cannot be written are lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines, self._bytes = self._lines, [], 0
        try:
            self._append(lines)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("events_not_kept", path=str(self.path), error=error.strerror or str(error))

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_NOFOLLOW: a symbolic link must not redirect the events to another file.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            data = (b"\n" if self._has_partial_line else b"") + b"".join(line + b"\n" for line in lines)
            while data:
                written = os.write(descriptor, data)
                self._has_partial_line = not data[:written].endswith(b"\n")
                data = data[written:]
        finally:
            os.close(descriptor)
