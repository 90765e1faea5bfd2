"""The guest's side of the guest protocol: bytes to frames and back, and the queue of frames on their way to the host.

The codec is the twin of workers/sandboxd/frames.py, which the guest may not import; tests/conformance/frames holds both
to one corpus.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections import deque

from guest.kernel import WRITE_LATER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

MAX_DOWN = 1_048_576
MAX_UP = 524_288
MAX_HEADER = 262_144
MAX_BODY_UP = 262_144
MAX_DEPTH = 32

_LENGTHS = struct.Struct(">II")
_LENGTH_BYTES = 4
_LAST_FLUSH_S = 1.0


class FrameError(ValueError):
    """Bytes that are no frame: the host broke the protocol."""


class Frame:
    """One frame; its header is checked JSON, its fields are not."""

    __slots__ = ("body", "header")

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header = header
        self.body = body


def encode_frame(header: Mapping[str, object], body: bytes = b"", *, max_total: int = MAX_UP) -> bytes:
    """The frame's bytes. Raises FrameError when the other side would refuse them."""
    try:
        text = json.dumps(dict(header), allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"the header cannot be written as JSON: {error}") from None
    return join_frame(text, body, max_total=max_total)


def join_frame(text: bytes, body: bytes, *, max_total: int = MAX_UP) -> bytes:
    """The frame of a header that is JSON text already. The guest writes its own headers: only lengths are judged."""
    total = _LENGTH_BYTES + len(text) + len(body)
    _check_lengths(total, len(text), max_total)
    return _LENGTHS.pack(total, len(text)) + text + body


class FrameDecoder:
    """Gathers bytes into frames. Holds at most one unfinished frame of `max_total` bytes."""

    def __init__(self, max_total: int = MAX_DOWN) -> None:
        self._max_total = max_total
        self._buffer = bytearray()
        self._failed = False

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises FrameError at the first broken one, and from then on always."""
        if self._failed:
            raise FrameError("the channel is already broken")
        self._buffer += data
        try:
            return self._take_frames()
        except FrameError:
            self._failed = True
            self._buffer = bytearray()
            raise

    def _take_frames(self) -> list[Frame]:
        frames = []
        at = 0
        # One deletion for all the frames of a feed, so that many small frames cost linear time.
        while True:
            end = self._end_of_frame(at)
            if end is None:
                break
            frames.append(self._parse_frame(at, end))
            at = end
        if at == len(self._buffer):
            # A fresh buffer gives the memory of a large frame back: PID 1 lives long and should stay small.
            self._buffer = bytearray()
        else:
            del self._buffer[:at]
        return frames

    def _end_of_frame(self, at: int) -> int | None:
        have = len(self._buffer) - at
        if have < _LENGTH_BYTES:
            return None
        total = int.from_bytes(self._buffer[at : at + _LENGTH_BYTES], "big")
        _check_total(total, self._max_total)
        if have < _LENGTHS.size:
            return None
        _check_lengths(total, _LENGTHS.unpack_from(self._buffer, at)[1], self._max_total)
        return at + _LENGTH_BYTES + total if have >= _LENGTH_BYTES + total else None

    def _parse_frame(self, at: int, end: int) -> Frame:
        body_at = at + _LENGTHS.size + _LENGTHS.unpack_from(self._buffer, at)[1]
        with memoryview(self._buffer) as view:
            text, body = bytes(view[at + _LENGTHS.size : body_at]), bytes(view[body_at:end])
        return Frame(_parse_header(text), body)


def _check_total(total: int, max_total: int) -> None:
    if not _LENGTH_BYTES < total <= max_total:
        raise FrameError(f"a frame of {total} bytes; allowed are {_LENGTH_BYTES + 1} to {max_total}")


def _check_lengths(total: int, header: int, max_total: int) -> None:
    _check_total(total, max_total)
    if not 1 <= header <= min(MAX_HEADER, total - _LENGTH_BYTES):
        raise FrameError(f"a header of {header} bytes in a frame of {total}")
    body = total - _LENGTH_BYTES - header
    if max_total == MAX_UP and body > MAX_BODY_UP:
        raise FrameError(f"a body of {body} bytes; allowed are {MAX_BODY_UP}")


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = _DECODER.decode(text.decode("utf-8"))
    except FrameError:
        raise
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise FrameError("the header is not a JSON object")
    # Fewer brackets than levels cannot nest too deep: most headers are not walked.
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH:
        _check_depth(header)
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise FrameError("a key is repeated in the header")
    return items


def _refuse_constant(name: str) -> None:
    raise FrameError(f"{name} in the header")


def _finite_float(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise FrameError("a number in the header is beyond the range of a double")
    return number


def _check_depth(header: dict[str, Any]) -> None:
    level: list[Any] = [header]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            inner.extend(value.values() if isinstance(value, dict) else value)
        level = [value for value in inner if isinstance(value, (dict, list))]
        if not level:
            return
    raise FrameError(f"the header nests deeper than {MAX_DEPTH}")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float)


class HostGone(Exception):
    """Nobody reads the guest's stdout any more."""


class Outbox:
    """A queue in front of a non-blocking descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.size = 0
        self._frames: deque[memoryview] = deque()

    def put(self, frame: bytes) -> None:
        """Queue a frame and send what can be sent now. Raises HostGone."""
        self._frames.append(memoryview(frame))
        self.size += len(frame)
        self.flush()

    def flush(self) -> None:
        try:
            while self._frames:
                sent = os.write(self.fd, self._frames[0])
                self.size -= sent
                if sent == len(self._frames[0]):
                    self._frames.popleft()
                else:
                    self._frames[0] = self._frames[0][sent:]
        except OSError as error:
            if error.errno not in WRITE_LATER:
                raise HostGone from error

    def flush_last(self) -> None:
        """Before the end: give the host a moment, and no more, to take the rest."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        give_up_at = time.monotonic() + _LAST_FLUSH_S
        while self._frames and poller.poll(max(0, int((give_up_at - time.monotonic()) * 1000))):
            self.flush()
            if time.monotonic() >= give_up_at:
                return
