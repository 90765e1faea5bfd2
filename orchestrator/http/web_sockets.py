"""The server's side of a WebSocket connection: bounds what a client makes the process hold.

Invariant: a connection holds one read of the socket, one message, and a write buffer, whatever the client sends and
however slowly it reads.
"""

import asyncio
import socket
from asyncio.transports import BaseTransport

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

MAX_MESSAGE_BYTES = 64 * 1024
PING_INTERVAL_S = 20.0
PONG_WITHIN_S = 20.0
LOST = "toolcrew.lost"
"""Key in `scope["state"]` of a WebSocket. Its value is an asyncio.Event that is set when the connection is lost, also
while the application does not read.
"""
_MAX_FRAGMENTS = 256
"""Limit of the frames of one message. Empty frames count for no limit of bytes, but take memory."""
_PARSED_BYTES = 4096
"""Bytes that are parsed at once. 4 KiB are at most 700 messages, each of which takes about 500 bytes of memory."""
_UNREACHABLE_S = 60
"""Seconds after which the kernel closes a connection whose peer acknowledges nothing, or accepts nothing."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket connection with bounded memory. Use it without compression, which would inflate small messages."""

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._unparsed = bytearray()
        self._lost = asyncio.Event()
        connection = transport.get_extra_info("socket")
        # Not every system has the option. Without it, the kernel needs about 15 minutes.
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHABLE_S * 1000)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        super().connection_lost(exc)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        # Without a valid handshake there is no scope and no application.
        if self.response.status_code == 101:
            self.scope["state"][LOST] = self._lost

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse what was read, until a message waits for the application or the client does not read."""
        while self._unparsed and not self.read_paused and self.writable.is_set() and not self.transport.is_closing():
            data = bytes(self._unparsed[:_PARSED_BYTES])
            del self._unparsed[:_PARSED_BYTES]
            super().data_received(data)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MAX_FRAGMENTS and not self.close_sent:
            self.conn.fail(1009, f"a message has more than {_MAX_FRAGMENTS} frames")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        # A client that sends pings and reads no pongs would otherwise fill the write buffer.
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()
            self._parse()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        self._parse()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._parse()

    def keepalive_timeout(self) -> None:
        if self.read_paused and not self.close_sent:
            # The pong may lie behind messages that the application has not taken yet.
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
