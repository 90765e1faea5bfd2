"""The guest protocol on the host (docs/guest-protocol.md): its codec, and its two kinds of connection: one to a worker,
the other to the guest of one sandbox.

Bytes from a guest are untrusted. Every length is checked before memory is allocated for it. The first invalid frame
closes the channel, because a reader cannot find the next frame after it.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from toolcrew.contract.json_limits import is_deeper

MAX_DOWN = 1_048_576
"""Maximum size of a frame from host to guest, in bytes, without the length field at its start."""
MAX_UP = 524_288
"""Maximum size of a frame from guest to host, in bytes, without the length field at its start."""
MAX_HEADER = 262_144
MAX_BODY_UP = 262_144
MAX_DEPTH = 32

_LENGTHS = struct.Struct(">II")
_LENGTH_BYTES = 4


class FrameError(ValueError):
    """The bytes are not a frame. The channel of the bytes is closed, because the next frame cannot be found."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame. Its header is valid JSON; the fields of the header are not checked."""

    header: dict[str, Any]
    body: bytes = b""


def encode_frame(header: Mapping[str, object], body: bytes = b"", *, max_total: int) -> bytes:
    """Return the bytes of the frame. Raises FrameError when the other side would refuse the frame."""
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
    """Collects bytes into frames. Holds at most one unfinished frame of `max_total` bytes.

    With the limit MAX_UP (frames from a guest) a body has at most MAX_BODY_UP bytes. With any other limit only the
    total size is limited.
    """

    def __init__(self, max_total: int = MAX_UP) -> None:
        self._max_total = max_total
        self._buffer = bytearray()
        self._failed = False

    @property
    def unfinished_bytes(self) -> int:
        """Return the size of the unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises FrameError at the first broken frame, and on every later
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
        frames: list[Frame] = []
        at = 0
        # Delete once for all frames of a feed, so that many small frames cost linear time.
        while (end := self._end_of_frame(at)) is not None:
            frames.append(self._parse_frame(at, end))
            at = end
        del self._buffer[:at]
        return frames

    def _end_of_frame(self, at: int) -> int | None:
        """Return the offset where the frame at `at` ends, or None while it is unfinished. Lengths are checked as soon
        as they arrive.
        """
        received = len(self._buffer) - at
        if received < _LENGTH_BYTES:
            return None
        total = int.from_bytes(self._buffer[at : at + _LENGTH_BYTES], "big")
        _check_total(total, self._max_total)
        if received < _LENGTHS.size:
            return None
        _check_lengths(total, _LENGTHS.unpack_from(self._buffer, at)[1], self._max_total)
        return at + _LENGTH_BYTES + total if received >= _LENGTH_BYTES + total else None

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
    # A header with fewer opening brackets than the maximum depth cannot nest too deep, so most headers need no closer
    # check.
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


_WAITING_BYTES = 512 * 1024
"""Reading stops while more received bytes than this wait to be processed."""
_UNSENT_BYTES = 512 * 1024
MAX_UNFINISHED_BYTES = 32 * 1024 * 1024
"""Limit of the unfinished frames of all guests together: a part of the memory of sandboxd's container."""
_FRAME_BYTES = 1024
"""Number of bytes that each frame counts in addition to its body, for its small header."""
_MUX_HEADER = struct.Struct(">BxxxI")
_STDOUT = 1
_DEBUG_BYTES = 4096
_PIPE_BYTES = 65_536


class WorkerLink(asyncio.Protocol):
    """A connection of a worker as an asyncio protocol, without a task of its own. `on_open` is called with the link
    when it is connected.

    After `watch`, `on_disconnect` is called when the worker has disconnected. `on_pace` is called with True when the
    worker reads too slowly, and with False when it has caught up.
    """

    def __init__(self, on_open: Callable[["WorkerLink"], None]) -> None:
        self._on_open = on_open
        self._on_disconnect: Callable[[], None] | None = None
        self._on_pace: Callable[[bool], None] | None = None
        self._decoder = FrameDecoder(MAX_DOWN)
        self._frames: deque[Frame] = deque()
        self._waiting_bytes = 0
        self._broken: FrameError | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._sendable = asyncio.Event()
        self._sendable.set()
        self.transport: asyncio.Transport | None = None
        self.is_disconnected = False

    def watch(self, on_disconnect: Callable[[], None], on_pace: Callable[[bool], None]) -> None:
        """Call `on_disconnect` and `on_pace` from now on; at once for an event that has already occurred."""
        self._on_disconnect, self._on_pace = on_disconnect, on_pace
        if self.is_disconnected:
            on_disconnect()
        elif not self._sendable.is_set():
            on_pace(True)

    def unwatch(self) -> None:
        self._on_disconnect = self._on_pace = None

    async def next(self) -> Frame | None:
        """Return the next frame, or None when the worker has left. Raises FrameError when the worker sent an invalid
        frame.
        """
        while not self._frames:
            if self._broken is not None:
                raise self._broken
            if self.is_disconnected:
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        frame = self._frames.popleft()
        self._count(-len(frame.body) - _FRAME_BYTES)
        return frame

    def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        """Send a frame. A frame to a worker that has left is dropped. Raises FrameError when the frame is too large."""
        data = encode_frame(header, body, max_total=MAX_DOWN)
        if self.transport is not None and not self.is_disconnected:
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the worker has read most of what was sent, or has left."""
        await self._sendable.wait()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._broken = error
            self._go()
            return
        self._frames += frames
        self._count(sum(len(frame.body) + _FRAME_BYTES for frame in frames))
        self._wake()

    def eof_received(self) -> bool:
        self._go()
        return True  # The task of the connection closes the transport.

    def connection_lost(self, exc: Exception | None) -> None:
        self._go()

    def pause_writing(self) -> None:
        if self.is_disconnected:
            return
        self._sendable.clear()
        if self._on_pace is not None:
            self._on_pace(True)

    def resume_writing(self) -> None:
        self._sendable.set()
        if self._on_pace is not None and not self.is_disconnected:
            self._on_pace(False)

    def _go(self) -> None:
        if self.is_disconnected:
            return
        self.is_disconnected = True
        self._sendable.set()
        self._wake()
        if self._on_disconnect is not None:
            self._on_disconnect()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _count(self, change: int) -> None:
        assert self.transport is not None
        before, self._waiting_bytes = self._waiting_bytes, self._waiting_bytes + change
        if before <= _WAITING_BYTES < self._waiting_bytes:
            self.transport.pause_reading()
        elif self._waiting_bytes <= _WAITING_BYTES < before and not self.is_disconnected:
            self.transport.resume_reading()


class UnfinishedFrames:
    """The unfinished frames of all guests. A correct guest finishes a frame at once. When the frames together are too
    large, channels of the owner whose frames are the largest close, the oldest frame first. No other owner loses one.
    """

    def __init__(self, max_bytes: int = MAX_UNFINISHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sizes: dict[GuestChannel, int] = {}
        """In the order in which the frames began."""

    def note(self, channel: "GuestChannel", size: int, *, is_new: bool) -> None:
        """Count the unfinished frame of a channel. `is_new`: it has begun now."""
        before = self._sizes.pop(channel, 0) if is_new or not size else self._sizes.get(channel, 0)
        self._bytes += size - before
        if size:
            self._sizes[channel] = size
        while self._bytes > self._max_bytes:
            oldest = self._find_oldest_of_largest()
            if oldest is None:
                return
            oldest.close("the guest did not finish a frame, and the unfinished frames of its tenant are too large")

    def _find_oldest_of_largest(self) -> "GuestChannel | None":
        """Return the channel to close; None if every channel is paused."""
        sizes = Counter[str]()
        for channel, size in self._sizes.items():
            # A paused channel cannot finish its frame.
            if not channel.is_paused:
                sizes[channel.owner()] += size
        if not sizes:
            return None
        largest = max(sizes, key=sizes.__getitem__)
        return next(channel for channel in self._sizes if not channel.is_paused and channel.owner() == largest)


_unfinished: "WeakKeyDictionary[asyncio.AbstractEventLoop, UnfinishedFrames]" = WeakKeyDictionary()


class GuestChannel(asyncio.Protocol):
    """Frames to and from one guest. The guest's bytes are hostile: the first broken frame closes the channel.

    `on_frame` is called with every frame, and `on_lost` once with a reason. The stderr of PID 1 is debug text: its last
    4 KiB are kept and never parsed. `stderr`: the pipe of this text; None when the socket multiplexes stdout and
    stderr. `owner`: returns the tenant of the sandbox; "" while it has none.
    """

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        stderr: int | None = None,
        owner: Callable[[], str] = lambda: "",
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self.owner = owner
        self._decoder = FrameDecoder(MAX_UP)
        self._mux = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = False
        self.is_paused = False
        self._unfinished = _unfinished.setdefault(asyncio.get_running_loop(), UnfinishedFrames())
        self._stderr = stderr
        self._debug_text = b""

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        stderr: int | None = None,
        owner: Callable[[], str] = lambda: "",
    ) -> "GuestChannel":
        """Open a channel over an attached socket. The channel then owns the socket and the pipe."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(on_frame, on_lost, stderr, owner), sock=sock)
        return channel

    def read_debug_text(self) -> bytes:
        """Return the last 4 KiB that PID 1 wrote to its stderr."""
        if self._stderr is not None:
            # A pipe holds at most 64 KiB, and a guest that writes more gets EAGAIN. So the pipe may stay unread.
            with contextlib.suppress(BlockingIOError):
                self._debug_text = (self._debug_text + os.read(self._stderr, _PIPE_BYTES))[-_DEBUG_BYTES:]
        return self._debug_text

    def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        """Send one frame. If the channel is lost, drop the frame, because `on_lost` has already reported the loss."""
        if self._transport is not None and not self._lost:
            self._transport.write(encode_frame(header, body, max_total=MAX_DOWN))

    async def drain(self) -> None:
        """Wait until the guest has read most of what was sent."""
        await self._writable.wait()

    def pause(self) -> None:
        """Stop reading, because the receiver of the frames is slow."""
        if self._transport is not None and not self._lost:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._lost:
            self.is_paused = False
            self._unfinished.note(self, self._decoder.unfinished_bytes, is_new=True)
            self._transport.resume_reading()

    def close(self, reason: str = "closed by sandboxd") -> None:
        """Close the connection. The guest then reads the end of its stdin and exits."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)
        if self._stderr is not None:
            self.read_debug_text()
            os.close(self._stderr)
            self._stderr = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        is_new = False
        try:
            for payload in self._demultiplex(data) if self._stderr is None else [data]:
                for frame in self._decoder.feed(payload):
                    # Processing a frame may end the sandbox. Drop the rest of the same read then.
                    if self._lost:
                        return
                    is_new = True
                    self._on_frame(frame)
        except FrameError as error:
            self.close(f"the guest broke the protocol: {error}")
        if not self._lost:
            self._unfinished.note(self, self._decoder.unfinished_bytes, is_new=is_new)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection to the container ended{f' ({exc})' if exc else ''}")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _lose(self, reason: str) -> None:
        self._writable.set()
        if not self._lost:
            self._lost = True
            self._unfinished.note(self, 0, is_new=True)
            self._on_lost(reason)

    def _demultiplex(self, data: bytes) -> list[bytes]:
        self._mux += data
        payloads: list[bytes] = []
        at = 0
        while len(self._mux) - at >= _MUX_HEADER.size:
            stream, size = _MUX_HEADER.unpack_from(self._mux, at)
            end = at + _MUX_HEADER.size + size
            if len(self._mux) < end:
                break
            payload = bytes(self._mux[at + _MUX_HEADER.size : end])
            if stream == _STDOUT:
                payloads.append(payload)
            else:
                self._debug_text = (self._debug_text + payload)[-_DEBUG_BYTES:]
            at = end
        del self._mux[:at]
        return payloads
