"""What a supervisor tells PID 1 over their pipe: records of a kind, a length and that many bytes."""

from __future__ import annotations

import json
import os
import select
import struct
import time

STREAMS = ("stdout", "stderr", "merged", "file", "live", "live_stderr", "lines")
DONE = 255
DONE_AND_FREE = 254
"""As DONE, from a supervisor that waits for its next call."""
FACTS = 253
"""What the keeper of a job tells of it, unasked."""
CHUNK_BYTES = 65_536
_RECORD = struct.Struct(">BI")


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
        except BlockingIOError:
            return

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
            except BlockingIOError:
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
