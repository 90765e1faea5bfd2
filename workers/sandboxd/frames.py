"""The host's codec of the guest protocol (docs/guest-protocol.md): bytes to frames and back, no I/O."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.json_limits import is_deeper

MAX_DOWN = 1_048_576
"""Largest total of a frame from host to guest."""
MAX_UP = 524_288
"""Largest total of a frame from guest to host."""
MAX_HEADER = 262_144
MAX_BODY_UP = 262_144
MAX_DEPTH = 32

_LENGTHS = struct.Struct(">II")
_LENGTH_BYTES = 4


class FrameError(ValueError):
    """Bytes that are no frame. The channel they came from is closed: there is no resynchronising."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; its header is checked JSON, its fields are not."""

    header: dict[str, Any]
    body: bytes = b""


def encode_frame(header: Mapping[str, object], body: bytes = b"", *, max_total: int) -> bytes:
    """The frame's bytes. Raises FrameError when the other side would refuse them."""
    try:
        text = json.dumps(dict(header), allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"the header cannot be written as JSON: {error}") from None
    total = _LENGTH_BYTES + len(text) + len(body)
    _check_lengths(total, len(text), max_total)
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH:
        _parse_header(text)
    return _LENGTHS.pack(total, len(text)) + text + body


class FrameDecoder:
    """Gathers bytes into frames. Holds at most one unfinished frame of `max_total` bytes.

    `max_total` tells the direction: at MAX_UP a body may have MAX_BODY_UP bytes, else what the total leaves.
    """

    def __init__(self, max_total: int = MAX_UP) -> None:
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
        frames: list[Frame] = []
        at = 0
        # One deletion for all the frames of a feed, so that many small frames cost linear time.
        while (end := self._end_of_frame(at)) is not None:
            frames.append(self._parse_frame(at, end))
            at = end
        del self._buffer[:at]
        return frames

    def _end_of_frame(self, at: int) -> int | None:
        """Where the frame at `at` ends, None while it is unfinished. Lengths are judged as soon as they are there."""
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
        header = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except FrameError:
        raise
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise FrameError("the header is not a JSON object")
    # Fewer brackets than levels cannot nest too deep: most headers are not walked.
    if text.count(b"{") + text.count(b"[") > MAX_DEPTH and is_deeper(header, MAX_DEPTH):
        raise FrameError(f"the header nests deeper than {MAX_DEPTH}")
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
    if not math.isfinite(number):
        raise FrameError("a number in the header is beyond the range of a double")
    return number
