"""The guest's side of the guest protocol: the codec of frames, and the queue of frames for the host.

workers/sandboxd/frames.py implements the same codec, but the guest cannot import it. tests/conformance/frames tests
both with the same data.
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
    """Error: the bytes are not a valid frame, so the host has broken the protocol."""


class Frame:
    """A frame. The header is valid JSON; the fields of the header are not checked."""

    __slots__ = ("body", "header")

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header = header
        self.body = body


def encode_frame(header: Mapping[str, object], body: bytes = b"", *, max_total: int = MAX_UP) -> bytes:
    """Return the bytes of the frame. Raises FrameError when the other side would refuse the frame."""
    try:
        text = json.dumps(dict(header), allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"the header cannot be written as JSON: {error}") from None
    return join_frame(text, body, max_total=max_total)


def join_frame(text: bytes, body: bytes, *, max_total: int = MAX_UP) -> bytes:
    """Return the bytes of a frame with a header that is already JSON text. Raises FrameError when a length is not
    allowed.

    The guest writes these headers itself, so only the lengths are checked.
    """
    total = _LENGTH_BYTES + len(text) + len(body)
    _check_lengths(total, len(text), max_total)
    return _LENGTHS.pack(total, len(text)) + text + body


class FrameDecoder:
    """Decoder of frames. Buffers at most one incomplete frame of `max_total` bytes."""

    def __init__(self, max_total: int = MAX_DOWN) -> None:
        self._max_total = max_total
        self._buffer = bytearray()
        self._failed = False

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises FrameError at the first invalid frame, and at every later
        call.
        """
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
        # All frames of a feed are deleted in one step, so that many small frames take linear time.
        while True:
            end = self._end_of_frame(at)
            if end is None:
                break
            frames.append(self._parse_frame(at, end))
            at = end
        if at == len(self._buffer):
            # Start with a new buffer, to release the memory of a large frame: PID 1 runs long and must stay small.
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
        # Check the total length before more bytes are buffered: a wrong length must not make PID 1 use memory without
        # limit.
        if have < _LENGTHS.size:
            return None
        _check_lengths(total, _LENGTHS.unpack_from(self._buffer, at)[1], self._max_total)
        return at + _LENGTH_BYTES + total if have >= _LENGTH_BYTES + total else None

    def _parse_frame(self, at: int, end: int) -> Frame:
        body_at = at + _LENGTHS.size + _LENGTHS.unpack_from(self._buffer, at)[1]
        with memoryview(self._buffer) as view:
            text, body = bytes(view[at + _LENGTHS.size : body_at]), bytes(view[body_at:end])
        return Frame(parse_object(text), body)


def _check_total(total: int, max_total: int) -> None:
    if not _LENGTH_BYTES < total <= max_total:
        raise FrameError(f"a frame has {total} bytes; allowed are {_LENGTH_BYTES + 1} to {max_total}")


def _check_lengths(total: int, header: int, max_total: int) -> None:
    _check_total(total, max_total)
    if not 1 <= header <= min(MAX_HEADER, total - _LENGTH_BYTES):
        raise FrameError(f"the header of a frame of {total} bytes has an invalid length: {header} bytes")
    body = total - _LENGTH_BYTES - header
    if max_total == MAX_UP and body > MAX_BODY_UP:
        raise FrameError(f"the body of a frame has {body} bytes; at most {MAX_BODY_UP} are allowed")


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a header. Raises FrameError."""
    try:
        header = _DECODER.decode(text.decode("utf-8"))
    except FrameError:
        raise
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise FrameError("the header is not a JSON object")
    # A header with at most MAX_DEPTH opening brackets cannot be too deep, so most headers need no closer check.
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH:
        _check_depth(header)
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    # Refuse a repeated key, as the host does: two parsers could read it differently.
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


class HostDisconnected(Exception):
    """Error: the host has closed the channel (the guest's stdout)."""


class Outbox:
    """A queue of frames in front of a non-blocking descriptor. `size` is the number of queued bytes."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.size = 0
        self._frames: deque[memoryview] = deque()

    def put(self, frame: bytes) -> None:
        """Queue a frame, and send as much as possible now. Raises HostDisconnected."""
        self._frames.append(memoryview(frame))
        self.size += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send as much as possible now. Raises HostDisconnected."""
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
                raise HostDisconnected from error

    def flush_last(self) -> None:
        """Send the rest before the guest ends. Wait at most _LAST_FLUSH_S seconds for the host. Raises
        HostDisconnected.
        """
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        give_up_at = time.monotonic() + _LAST_FLUSH_S
        while self._frames and poller.poll(max(0, int((give_up_at - time.monotonic()) * 1000))):
            self.flush()
            if time.monotonic() >= give_up_at:
                return
