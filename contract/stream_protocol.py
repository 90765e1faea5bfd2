"""The stream protocol: how a client's stream reaches a process, a port or a file of a sandbox.

The same frames travel between the API and a host's stream gateway, and between the gateway and the stream server of a
sandbox. docs/stream-protocol.md defines them. Bytes of a sandbox are untrusted: sizes are checked before memory is
taken, and the first invalid frame ends the connection.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

HEADER: Final = struct.Struct(">IBBHIQ")
"""Size of the payload, kind, flags, zero, stream, offset."""
MAX_DATA_BYTES: Final = 32_768
"""Largest payload of DATA, and so the longest time that a large stream delays a key."""
MAX_JSON_BYTES: Final = 65_536
"""Largest payload of the kinds with JSON."""
MAX_PING_BYTES: Final = 64
EPOCH_BYTES: Final = 20
"""A number (4 bytes, big-endian) and 16 random bytes."""
EPOCH_HEADER: Final = HEADER.pack(EPOCH_BYTES, 11, 0, 0, 0, 0)
"""Header of EPOCH. These bytes occur nowhere else in a channel, so that a reader finds EPOCH after half a frame."""
SERVER_RESTART: Final = bytes(EPOCH_BYTES)
"""Payload of an EPOCH that answers no other: the stream server has no streams, because it is new or because it has
refused a frame.
"""
BY_GATEWAY: Final = 1
"""Offset of END and REPLY that a gateway made itself. Those of a sandbox have 0, so that it cannot name errors of the
service.
"""
WINDOW_BYTES: Final = 65_536
"""Bytes of one direction that may be on their way before the receiver grants more."""
BULK_WINDOW_BYTES: Final = 262_144
"""Window of files and ports."""
STDERR: Final = 1
"""Flag of DATA: the bytes are from the standard error of a process."""
LAST: Final = 2
"""Flag of DATA: this direction of the stream ends after these bytes."""


class FrameKind(IntEnum):
    """Kind of a frame. OPEN, CALL and CLOSE go to the sandbox; OPENED, END and REPLY come from it; the others go in
    both directions.
    """

    OPEN = 1
    OPENED = 2
    DATA = 3
    CREDIT = 4
    END = 5
    CALL = 6
    REPLY = 7
    CLOSE = 8
    PING = 9
    PONG = 10
    EPOCH = 11


# DATA that contains so many bytes of EPOCH_HEADER is cut there. The rest cannot follow: the next header begins with
# at most 4 zeros, and an EPOCH after a part of that header with 3 more.
_CUT_BYTES: Final = 13
_JSON_KINDS = frozenset({FrameKind.OPEN, FrameKind.OPENED, FrameKind.END, FrameKind.CALL, FrameKind.REPLY})
_MAX_BYTES: Final = {kind: MAX_JSON_BYTES if kind in _JSON_KINDS else 0 for kind in FrameKind} | {
    FrameKind.DATA: MAX_DATA_BYTES,
    FrameKind.PING: MAX_PING_BYTES,
    FrameKind.PONG: MAX_PING_BYTES,
    FrameKind.EPOCH: EPOCH_BYTES,
}


class StreamFrameError(ValueError):
    """Raised when bytes are not a frame. The connection ends, because the next frame cannot be found."""


@dataclass(frozen=True, slots=True)
class StreamFrame:
    """A frame. `stream`: a number that the client's side chooses; it rises and is never used again in an epoch.

    `offset`: of DATA, the position of its first byte; of CREDIT, the position up to which the receiver of the frame may
    send.
    """

    kind: FrameKind
    stream: int = 0
    offset: int = 0
    payload: bytes = b""
    flags: int = 0

    def encode(self) -> bytes:
        """Return the bytes of the frame for a channel. DATA with the header of EPOCH becomes several frames."""
        if self.kind is not FrameKind.DATA:
            return self.encode_whole()
        parts: list[bytes] = []
        self._encode_range(0, len(self.payload), self.flags, parts)
        return b"".join(parts)

    def _encode_range(self, at: int, end: int, flags: int, parts: list[bytes]) -> None:
        # Without copies of the rest, so that hostile data takes time in proportion to its length.
        while (size := self._find_cut(at, end, flags)) < end - at:
            # The shorter frame has another header, which may need another cut.
            self._encode_range(at, at + size, flags & ~LAST, parts)
            at += size
        parts += [self._pack(end - at, flags, at), self.payload[at:end]]

    def encode_whole(self) -> bytes:
        """Return the bytes of the frame for a connection without EPOCH."""
        return self._pack(len(self.payload), self.flags, 0) + self.payload

    def _pack(self, size: int, flags: int, at: int) -> bytes:
        return HEADER.pack(size, self.kind, flags, 0, self.stream, self.offset + at)

    def _find_cut(self, at: int, end: int, flags: int) -> int:
        """Return how many bytes of the payload between two indexes the next frame may have."""
        head = self._pack(end - at, flags, at) + self.payload[at : min(end, at + _CUT_BYTES - 1)]
        found = head.find(EPOCH_HEADER[:_CUT_BYTES], 1)
        if found < 0 and (inside := self.payload.find(EPOCH_HEADER[:_CUT_BYTES], at, end)) >= 0:
            found = inside - at + HEADER.size
        return max(1, found + _CUT_BYTES - 1 - HEADER.size) if found >= 0 else end - at


class StreamDecoder:
    """Collects bytes into frames. Holds at most one unfinished frame.

    `has_epochs`: the header of EPOCH is found at any place. What precedes it and is not a whole frame is dropped: its
    sender has ended.
    """

    def __init__(self, *, has_epochs: bool = True) -> None:
        self._has_epochs = has_epochs
        # The last bytes of the frames before, and from the index `_at` on, the begin of the next frame.
        self._buffer = bytearray()
        self._at = 0
        self._failed = False

    def feed(self, data: bytes) -> list[StreamFrame]:
        """Return the frames that `data` completes. Raises StreamFrameError at the first invalid frame and on every
        later call.
        """
        if self._failed:
            raise StreamFrameError("the connection already had an invalid frame")
        search_from = max(0, len(self._buffer) - HEADER.size + 1)
        self._buffer += data
        frames: list[StreamFrame] = []
        while self._has_epochs and (at := self._buffer.find(EPOCH_HEADER, search_from)) >= 0:
            self._take_frames(at, frames)
            self._at = at
            search_from = at + 1
        self._take_frames(len(self._buffer), frames)
        # Delete once for all frames of a feed, so that many small frames cost linear time.
        unused = max(0, self._at - HEADER.size + 1)
        del self._buffer[:unused]
        self._at -= unused
        return frames

    def _take_frames(self, limit: int, frames: list[StreamFrame]) -> None:
        """Append the whole frames before the index `limit`."""
        while limit - self._at >= HEADER.size:
            size, number, flags, zero, stream, offset = HEADER.unpack_from(self._buffer, self._at)
            kind = self._check(size, number, flags, zero)
            end = self._at + HEADER.size + size
            if end > limit:
                break
            payload = bytes(memoryview(self._buffer)[self._at + HEADER.size : end])
            frames.append(StreamFrame(kind, stream, offset, payload, flags))
            self._at = end

    def _check(self, size: int, number: int, flags: int, zero: int) -> FrameKind:
        kind = FrameKind(number) if 1 <= number <= FrameKind.EPOCH else None
        allowed_flags = STDERR | LAST if kind is FrameKind.DATA else 0
        if kind is None or zero or flags & ~allowed_flags or size > _MAX_BYTES[kind]:
            self._failed = True
            self._buffer.clear()
            raise StreamFrameError(f"a frame of kind {number} with flags {flags} and {size} bytes is invalid")
        return kind
