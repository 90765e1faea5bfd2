"""The stream server's side of the stream protocol: the codec of frames.

contract/stream_protocol.py implements the same codec, but the guest cannot import it. tests/conformance tests both with
the same bytes.
"""

from __future__ import annotations

import json
import struct

from guest.frames import parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

INVALID, OPEN, OPENED, DATA, CREDIT, END, CALL, REPLY, CLOSE, PING, PONG, EPOCH = range(12)
"""Kinds of frames. INVALID never travels."""
STDERR, LAST = 1, 2
"""Flags of DATA."""
MAX_DATA_BYTES = 32_768
MAX_JSON_BYTES = 65_536
EPOCH_BYTES = 20
WINDOW_BYTES = 65_536
BULK_WINDOW_BYTES = 262_144
HEADER = struct.Struct(">IBBHIQ")
EPOCH_HEADER = HEADER.pack(EPOCH_BYTES, EPOCH, 0, 0, 0, 0)
"""Header of EPOCH. These bytes occur nowhere else in a channel (`encode` sees to it), so that a reader finds EPOCH even
if the frame before is not whole.
"""
SERVER_RESTART = bytes(EPOCH_BYTES)
"""Payload of an EPOCH that answers no other: the server has no streams, because it is new or has refused a frame."""

# DATA that contains so many bytes of EPOCH_HEADER is cut there. The rest cannot follow: the next header begins with
# at most 4 zeros, and an EPOCH after a part of that header with 3 more.
_CUT_BYTES = 13
_MAX_BYTES = {kind: MAX_JSON_BYTES if kind in (OPEN, OPENED, END, CALL, REPLY) else 0 for kind in range(OPEN, EPOCH)}
_MAX_BYTES.update({DATA: MAX_DATA_BYTES, PING: 64, PONG: 64, EPOCH: EPOCH_BYTES})


class StreamFrame:
    """A frame. `offset`: of DATA, the position of its first byte; of CREDIT, the position up to which the receiver of
    the frame may send.
    """

    __slots__ = ("flags", "kind", "offset", "payload", "stream")

    def __init__(self, kind: int, stream: int = 0, offset: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.kind = kind
        self.stream = stream
        self.offset = offset
        self.payload = payload
        self.flags = flags

    def encode(self) -> bytes:
        """Return the bytes of the frame. DATA that contains the header of EPOCH becomes several frames."""
        encoded, offset, rest = b"", self.offset, self.payload
        while True:
            data = HEADER.pack(len(rest), self.kind, self.flags, 0, self.stream, offset) + rest
            at = data.find(EPOCH_HEADER[:_CUT_BYTES], 1) if self.kind == DATA else -1
            size = max(1, at + _CUT_BYTES - 1 - HEADER.size)
            if at < 0 or size >= len(rest):
                return encoded + data
            encoded += StreamFrame(DATA, self.stream, offset, rest[:size], self.flags & ~LAST).encode()
            offset, rest = offset + size, rest[size:]

    def parse(self) -> dict[str, Any]:
        """Return the JSON object of the payload. Raises FrameError."""
        return parse_object(self.payload)


def encode_fields(kind: int, stream: int, fields: Mapping[str, object]) -> bytes:
    """Return the bytes of a frame with a JSON object. Raises ValueError when the object is too large."""
    payload = json.dumps(dict(fields), allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(payload) > MAX_JSON_BYTES:
        raise ValueError(f"a JSON payload has {len(payload)} bytes")
    return StreamFrame(kind, stream, payload=payload).encode()


class StreamDecoder:
    """Collects bytes into frames. Holds at most one unfinished frame.

    The header of EPOCH is found at any place: what precedes it and is not a whole frame is dropped. An invalid frame
    becomes a frame of kind INVALID, and everything up to the next EPOCH is dropped.
    """

    def __init__(self) -> None:
        # The last bytes of the frames before, and from the index `_at` on, the begin of the next frame.
        self._buffer = bytearray()
        self._at = 0
        self._is_broken = False

    def feed(self, data: bytes, more_follow: bool = False) -> list[StreamFrame]:
        """Return the frames that `data` completes. `more_follow`: `feed` is called again at once, so that a frame is
        not completed by the first bytes of an EPOCH.
        """
        search_from = max(0, len(self._buffer) - HEADER.size + 1)
        self._buffer += data
        frames: list[StreamFrame] = []
        while (at := self._buffer.find(EPOCH_HEADER, search_from)) >= 0:
            self._take_frames(at, frames)
            self._at, self._is_broken = at, False
            search_from = at + 1
        self._take_frames(len(self._buffer) - (HEADER.size - 1 if more_follow else 0), frames)
        # Delete once for all frames of a feed, so that many small frames cost linear time.
        unused = max(0, self._at - HEADER.size + 1)
        del self._buffer[:unused]
        self._at -= unused
        return frames

    def _take_frames(self, limit: int, frames: list[StreamFrame]) -> None:
        """Append the whole frames before the index `limit`."""
        while not self._is_broken and limit - self._at >= HEADER.size:
            size, kind, flags, zero, stream, offset = HEADER.unpack_from(self._buffer, self._at)
            if zero or size > _MAX_BYTES.get(kind, -1) or flags & ~(STDERR | LAST if kind == DATA else 0):
                self._is_broken = True
                frames.append(StreamFrame(INVALID))
                break
            end = self._at + HEADER.size + size
            if end > limit:
                break
            with memoryview(self._buffer) as view:
                payload = bytes(view[self._at + HEADER.size : end])
            frames.append(StreamFrame(kind, stream, offset, payload, flags))
            self._at = end
        if self._is_broken:
            self._at = max(self._at, limit)
