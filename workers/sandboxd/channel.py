"""The frames of one sandbox: the attached socket demultiplexed, decoded, and handed on as events."""

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping

from workers.sandboxd.frames import MAX_DOWN, MAX_UP, Frame, FrameDecoder, FrameError, encode_frame

_MUX_HEADER = struct.Struct(">BxxxI")
_STDOUT = 1
_DEBUG_BYTES = 4096


class GuestChannel(asyncio.Protocol):
    """Frames to and from one guest. What the guest writes is hostile: the first broken frame closes the channel.

    `on_frame` gets every frame, `on_lost` a reason, once. stderr of PID 1 is debug text: its last 4 KiB are kept, never parsed.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = FrameDecoder(MAX_UP)
        self._mux = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = False
        self.debug_text = b""

    @classmethod
    async def open(cls, sock: socket.socket, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> "GuestChannel":
        """A channel over an attached socket, which it then owns."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(on_frame, on_lost), sock=sock)
        return channel

    def send(self, header: Mapping[str, object], body: bytes = b"") -> None:
        """Send one frame; a lost channel takes it silently, its `on_lost` has told already."""
        if self._transport is not None and not self._lost:
            self._transport.write(encode_frame(header, body, max_total=MAX_DOWN))

    async def drain(self) -> None:
        """Wait until the guest has taken most of what was sent."""
        await self._writable.wait()

    def pause(self) -> None:
        """Stop reading: whoever takes the events is slow."""
        if self._transport is not None and not self._lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._lost:
            self._transport.resume_reading()

    def close(self, reason: str = "closed by sandboxd") -> None:
        """Close the connection; the guest then sees the end of its stdin and exits."""
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._demultiplex(data):
                for frame in self._decoder.feed(payload):
                    if self._lost:
                        return
                    self._on_frame(frame)
        except FrameError as error:
            self.close(f"the guest broke the protocol: {error}")

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
                self.debug_text = (self.debug_text + payload)[-_DEBUG_BYTES:]
            at = end
        del self._mux[:at]
        return payloads
