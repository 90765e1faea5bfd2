"""The connection of one client, which is usually an API process, with the streams that it has opened.

A frame that breaks the protocol ends the connection and with it its streams. A stream that is refused ends alone.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from toolcrew.concurrency.stream_connection import StreamConnection
from toolcrew.concurrency.stream_outbox import StreamOutbox
from toolcrew.contract.errors import OperatorError, SandboxUnavailable, StreamLost, ToolFailure
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_gateways import (
    MAX_LINE_BYTES,
    NONCE_BYTES,
    build_greeting,
    build_proof,
    check_proof,
    describe_handshake,
)
from toolcrew.contract.stream_protocol import FrameKind, StreamFrame
from toolcrew.workers.stream_gateway.channels import SessionChannel
from toolcrew.workers.stream_gateway.limits import StreamUsage
from toolcrew.workers.stream_gateway.relays import RelayState, StreamRelay, StreamViolation, build_failure
from toolcrew.workers.stream_gateway.tickets import TicketGate

log = structlog.get_logger(__name__)


class ChannelSource(Protocol):
    """Source of the channels of sessions."""

    def find(self, session: str, fence: int) -> SessionChannel:
        """Return the channel of a session, a new one if there is none. Raises ToolFailure for an earlier fence."""
        ...

    def limit_memory(self) -> None:
        """End channels while the frames of all channels need too much memory."""
        ...


class ClientConnection:
    """The connection of a client. `certificate`: SHA-256 in hex. `on_end` is called once when it has ended, and
    `on_proved` when the client has proved that it belongs to the deployment.
    """

    def __init__(
        self,
        keys: SigningKeys,
        certificate: str,
        gate: TicketGate,
        channels: ChannelSource,
        usage: StreamUsage,
        on_proved: Callable[["ClientConnection"], None],
        on_end: Callable[["ClientConnection"], None],
    ) -> None:
        self._keys = keys
        self._certificate = certificate
        self._gate = gate
        self._channels = channels
        self._usage = usage
        self._on_proved = on_proved
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._line = b""
        self._relays: dict[int, StreamRelay] = {}
        self._owners: dict[int, tuple[str, str]] = {}
        self._last_number = 0
        self.connection = StreamConnection(StreamOutbox(has_epochs=False))
        self.connection.on_open = self._greet
        self.connection.on_bytes = self._read_proof
        self.connection.on_lost = lambda reason: self._lose(reason, on_end)

    def end_streams(self, error: ToolFailure | OperatorError) -> None:
        """End all streams of the client with an error."""
        for relay in list(self._relays.values()):
            relay.leave(error)

    # --- Handshake

    def _greet(self) -> None:
        self.connection.write(f"{build_greeting(self._nonce)}\n".encode())

    def _read_proof(self, data: bytes) -> None:
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            raise StreamViolation("the first line is too long")
        if not end:
            return
        nonce, _, proof = line.decode(errors="replace").partition(" ")
        handshake = describe_handshake(self._nonce, nonce, self._certificate)
        if len(nonce) != 2 * NONCE_BYTES or not check_proof(self._keys, "client", handshake, proof):
            raise StreamViolation("the client does not prove that it has TOOLCREW_SECRET")
        answer = build_proof(self._keys, "gateway", handshake, proof.partition(" ")[0])
        self.connection.write(f"{answer}\n".encode())
        self._on_proved(self)
        self.connection.begin_frames(self._take_frames, rest)

    # --- Frames

    def send(self, frame: StreamFrame) -> None:
        """Send a frame when its turn comes."""
        self.connection.send(frame)
        self._limit_memory()

    def memory_of(self, stream: int) -> int:
        """Return the memory of the data that waits for one stream."""
        return self.connection.outbox.memory_of(stream)

    def _limit_memory(self) -> None:
        """End the streams with the most waiting bytes while the client reads too slowly. Streams of other tenants share
        the connection, so it ends only if that is not enough.
        """
        while self.connection.memory > self._usage.limits.client_memory:
            largest = max(self._relays.values(), key=lambda relay: self.memory_of(relay.client_number), default=None)
            if largest is None or not self.memory_of(largest.client_number):
                self.connection.end("the client does not read")
                return
            tenant, session = self._owners[largest.client_number]
            log.warning("stream_ended", tenant=tenant, session=session, reason="the client does not read")
            self.connection.outbox.forget(largest.client_number)
            largest.leave(SandboxUnavailable("the stream was read too slowly, so it was ended: attach again"))

    def remove(self, relay: StreamRelay) -> None:
        """Forget a stream that has ended."""
        if self._relays.pop(relay.client_number, None) is not None:
            self._usage.close(*self._owners.pop(relay.client_number))

    def _take_frames(self, frames: Sequence[StreamFrame]) -> None:
        for frame in frames:
            self._take(frame)
        self._channels.limit_memory()

    def _take(self, frame: StreamFrame) -> None:
        if frame.kind in (FrameKind.OPEN, FrameKind.CALL):
            self._open(frame)
        elif frame.kind is FrameKind.PING:
            self.send(StreamFrame(FrameKind.PONG, payload=frame.payload))
        elif frame.kind not in (FrameKind.DATA, FrameKind.CREDIT, FrameKind.CLOSE):
            raise StreamViolation(f"{frame.kind.name} from a client")
        elif not 0 < frame.stream <= self._last_number:
            raise StreamViolation(f"{frame.kind.name} for stream {frame.stream}, which was never opened")
        elif (relay := self._relays.get(frame.stream)) is not None:
            if frame.kind is FrameKind.CLOSE:
                self.connection.outbox.forget(frame.stream)
            relay.pass_down(frame)
        # Otherwise the stream has ended, and the client did not know so yet.

    def _open(self, frame: StreamFrame) -> None:
        if frame.stream <= self._last_number:
            raise StreamViolation("a stream number is used again")
        self._last_number = frame.stream
        try:
            request = self._gate.admit(frame)
            tenant, session = request.ticket.tenant, request.ticket.session
            channel = self._find_channel(tenant, session, request.ticket.fence)
        except (ToolFailure, OperatorError) as error:
            self.send(build_failure(frame.kind, frame.stream, error))
            return
        number = channel.next_number()
        first = StreamFrame(frame.kind, number, payload=request.payload)
        relay = StreamRelay(self, channel, frame.stream, number, first)
        self._relays[frame.stream], self._owners[frame.stream] = relay, (tenant, session)
        channel.add(relay)

    def _find_channel(self, tenant: str, session: str, fence: int) -> SessionChannel:
        """Count a stream, and return the channel of its session. Raises ToolFailure."""
        # Count first: a channel that opens for a refused stream would never be idle, and so stay open.
        self._usage.open(tenant, session)
        try:
            return self._channels.find(f"{tenant}:{session}", fence)
        except ToolFailure:
            self._usage.close(tenant, session)
            raise

    def _lose(self, reason: str, on_end: Callable[["ClientConnection"], None]) -> None:
        log.info("stream_client_left", reason=reason, streams=len(self._relays))
        for relay in list(self._relays.values()):
            if relay.state is not RelayState.ENDED:
                relay.pass_down(StreamFrame(FrameKind.CLOSE, relay.client_number))
        on_end(self)


def build_drained() -> StreamLost:
    """Return the error of streams whose gateway ends."""
    return StreamLost("the stream gateway of the host ends: attach again, another one takes its place")
