"""The connection of this process to one stream gateway. All streams to the sandboxes of a host share it."""

import asyncio
import hashlib
import secrets
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from toolcrew.concurrency.stream_connection import StreamConnection
from toolcrew.concurrency.stream_outbox import StreamOutbox
from toolcrew.contract.errors import SandboxUnavailable, StreamLost
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_gateways import (
    MAX_LINE_BYTES,
    NONCE_BYTES,
    StreamGateway,
    build_proof,
    check_proof,
    describe_handshake,
    parse_greeting,
)
from toolcrew.contract.stream_protocol import FrameKind, StreamFrame, StreamFrameError
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

CONNECT_S = 5.0
PING_S = 10.0
SILENCE_S = 25.0
"""Seconds without an answer after which the gateway counts as lost."""


class FrameReceiver(Protocol):
    """Receives the frames of one stream or request."""

    def take(self, frame: StreamFrame) -> None:
        """Receive a frame."""
        ...

    def lose(self, error: StreamLost) -> None:
        """Learn that the connection was lost."""
        ...


class GatewayConnection:
    """An open connection, from `open_connection`."""

    def __init__(self, keys: SigningKeys, gateway: StreamGateway) -> None:
        self.gateway = gateway
        self._keys = keys
        self._receivers: dict[int, FrameReceiver] = {}
        self._last_number = 0
        self._handshake = ""
        self._line = b""
        self._proved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost = False
        self._heard_at = asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self.connection = StreamConnection(StreamOutbox(has_epochs=False))
        self.connection.on_bytes = self._read_line
        self.connection.on_lost = self._lose

    @property
    def is_lost(self) -> bool:
        return self._lost

    async def connect(self, address: str) -> None:
        """Connect, and check the certificate and the proof of the gateway. Raises OSError, TimeoutError and
        StreamFrameError.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(
                    lambda: self.connection, address, self.gateway.port, ssl=_build_context(), server_hostname=""
                )
                await self._proved
        except BaseException:
            self.connection.end("the connection was not opened")
            raise
        self._timer = loop.call_later(PING_S, self._ping)

    def begin(self, receiver: FrameReceiver, kind: FrameKind, payload: bytes) -> int:
        """Open a stream or make a request. Return its number. Raises StreamLost."""
        if self._lost:
            raise StreamLost("the connection to the stream gateway was lost: try again")
        self._last_number += 1
        number = self._last_number
        self._receivers[number] = receiver
        self.connection.send(StreamFrame(kind, number, payload=payload))
        return number

    def send(self, frame: StreamFrame) -> None:
        """Send a frame of a stream. After the end of the stream it is dropped."""
        if frame.stream in self._receivers:
            self.connection.send(frame)

    def leave(self, number: int) -> None:
        """Leave a stream or a request that may not have ended."""
        if self._receivers.pop(number, None) is not None:
            self.connection.send(StreamFrame(FrameKind.CLOSE, number))

    def close(self) -> None:
        """Close the connection, after its last frames were sent."""
        self.connection.close("this process has closed the connection")

    # --- Handshake

    def _read_line(self, data: bytes) -> None:
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            raise StreamFrameError("the line of the gateway is too long")
        if not end:
            return
        self._line = b""
        text = line.decode(errors="replace")
        if not self._handshake:
            self._answer_greeting(text)
            self._read_line(rest)
        elif check_proof(self._keys, "gateway", self._handshake, text):
            self.connection.begin_frames(self._take_frames, rest)
            self._proved.set_result(None)
        else:
            raise StreamFrameError("the gateway does not prove that it has TOOLCREW_SECRET")

    def _answer_greeting(self, line: str) -> None:
        nonce = parse_greeting(line)
        if nonce is None:
            raise StreamFrameError(
                "the gateway speaks another version of the protocol: run the same release everywhere"
            )
        digest = self._read_certificate()
        if not secrets.compare_digest(digest, self.gateway.certificate):
            raise StreamFrameError("the certificate is not the published one: another program answers at the address")
        own_nonce = secrets.token_hex(NONCE_BYTES)
        self._handshake = describe_handshake(nonce, own_nonce, digest)
        self.connection.write(f"{own_nonce} {build_proof(self._keys, 'client', self._handshake)}\n".encode())

    def _read_certificate(self) -> str:
        assert self.connection.transport is not None
        sock: socket.socket = self.connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls: ssl.SSLObject = self.connection.transport.get_extra_info("ssl_object")
        return hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()

    # --- Frames

    def _take_frames(self, frames: Sequence[StreamFrame]) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        for frame in frames:
            receiver = self._receivers.get(frame.stream)
            if receiver is None:
                continue  # PONG, or a stream that this process has left
            if frame.kind in (FrameKind.END, FrameKind.REPLY):
                del self._receivers[frame.stream]
                self.connection.outbox.forget(frame.stream)
            receiver.take(frame)

    def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._heard_at > SILENCE_S:
            self.connection.end(f"the stream gateway has not answered for {SILENCE_S:g} s")
            return
        self.connection.send(StreamFrame(FrameKind.PING))
        self._timer = loop.call_later(PING_S, self._ping)

    def _lose(self, reason: str) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        if not self._proved.done():
            self._proved.set_exception(ConnectionError(reason))
            self._proved.exception()  # `connect` may have ended already
        receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            receiver.lose(StreamLost(f"the connection to the stream gateway was lost ({reason}): attach again"))


async def open_connection(keys: SigningKeys, gateway: StreamGateway) -> GatewayConnection:
    """Connect to a gateway at one of its addresses. Raises SandboxUnavailable."""
    reasons: list[str] = []
    for address in gateway.addresses:
        connection = GatewayConnection(keys, gateway)
        try:
            await connection.connect(address)
        except (OSError, TimeoutError, StreamFrameError) as error:
            reasons.append(f"{address}:{gateway.port}: {error or 'no answer in time'}")
        else:
            return connection
    raise SandboxUnavailable(
        f"the stream gateway of the session's host cannot be reached ({'; '.join(reasons)}): check its log, and that "
        "TOOLCREW_STREAM_ADDRESS of the host is an address that the API can reach"
    )


def _build_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    # The record of the gateway has the digest of the certificate, which no authority has signed.
    context.verify_mode = ssl.CERT_NONE
    return context
