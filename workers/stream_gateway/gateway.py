"""All connections of one gateway: its clients, and the channels of sessions that they use."""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from toolcrew.concurrency.stream_connection import StreamConnection
from toolcrew.concurrency.stream_outbox import MemoryCount
from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.signing import SigningKeys
from toolcrew.workers.stream_gateway.channels import OpenChannel, SessionChannel
from toolcrew.workers.stream_gateway.clients import ClientConnection, build_drained
from toolcrew.workers.stream_gateway.limits import StreamLimits, StreamUsage
from toolcrew.workers.stream_gateway.tickets import TicketGate

log = structlog.get_logger(__name__)

HANDSHAKE_S = 5.0
"""Seconds that a client has for its proof."""
MAX_CLIENTS = 256
MAX_UNPROVED = 64
"""Limit of the connections without a proof. Above it, the oldest one ends."""
FLUSH_S = 2.0
"""Seconds that clients have to read the end of their streams when the gateway ends."""


class StreamGatewayServer:
    """Accepts clients, and connects their streams to the channels of sessions."""

    def __init__(
        self,
        keys: SigningKeys,
        certificate: str,
        gate: TicketGate,
        open_channel: OpenChannel,
        limits: StreamLimits | None = None,
    ) -> None:
        self._keys = keys
        self._certificate = certificate
        self._gate = gate
        self._open_channel = open_channel
        self.usage = StreamUsage(limits or StreamLimits())
        self._memory = MemoryCount()
        self._channels: dict[str, SessionChannel] = {}
        self._clients: set[ClientConnection] = set()
        self._no_clients = asyncio.Event()
        self._no_clients.set()
        self._unproved: dict[ClientConnection, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def memory(self) -> int:
        """Bytes of memory of the frames that wait for sandboxes."""
        return self._memory.bytes

    def accept(self) -> StreamConnection:
        """Return the protocol of a new connection."""
        client = ClientConnection(
            self._keys, self._certificate, self._gate, self, self.usage, self._prove, self._forget_client
        )
        greet = client.connection.on_open
        client.connection.on_open = lambda: self._start_client(client, greet)
        return client.connection

    def find(self, session: str, fence: int) -> SessionChannel:
        """Return the channel of a session, a new one if there is none. Raises ToolFailure(SESSION_NOT_FOUND) for a
        ticket from before the present opening of the session.
        """
        channel = self._channels.get(session)
        if channel is None:
            channel = SessionChannel(self._open_channel, session, fence, self.usage, self._memory, self._forget_channel)
            self._channels[session] = channel
        elif fence < channel.fence:
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND,
                "the session was opened again meanwhile: read its host again, and try again",
            )
        # A new worker of the host has taken the session over. Open streams stay.
        channel.fence = max(channel.fence, fence)
        return channel

    def limit_memory(self) -> None:
        """End the channels whose sandboxes read most slowly while the frames of all channels need too much memory."""
        while self._memory.bytes > self.usage.limits.channels_memory:
            largest = max(self._channels.values(), key=lambda channel: channel.memory)
            log.warning("stream_channel_ended", session=largest.session, reason="the memory for streams is full")
            largest.end(SandboxUnavailable("the sandbox read its streams too slowly, so they were ended: attach again"))

    async def close(self) -> None:
        """End all streams, and let their clients know."""
        for client in list(self._clients):
            client.end_streams(build_drained())
            client.connection.close("the gateway ends")
        for channel in list(self._channels.values()):
            channel.end(build_drained())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._no_clients.wait()
        for client in list(self._clients):
            client.connection.end("the gateway ends")
        await cancel_all(self._closing)

    def _start_client(self, client: ClientConnection, greet: Callable[[], None]) -> None:
        self._clients.add(client)
        self._no_clients.clear()
        if len(self._unproved) >= MAX_UNPROVED:
            next(iter(self._unproved)).connection.end("too many connections without a proof")
        if len(self._clients) > MAX_CLIENTS:
            log.warning("stream_client_refused", clients=len(self._clients))
            client.connection.end("too many connections")
            return
        end = client.connection.end
        self._unproved[client] = asyncio.get_running_loop().call_later(HANDSHAKE_S, end, "no proof in time")
        greet()

    def _prove(self, client: ClientConnection) -> None:
        self._unproved.pop(client).cancel()

    def _forget_client(self, client: ClientConnection) -> None:
        self._clients.discard(client)
        if not self._clients:
            self._no_clients.set()
        timer = self._unproved.pop(client, None)
        if timer is not None:
            timer.cancel()

    def _forget_channel(self, channel: SessionChannel) -> None:
        if self._channels.get(channel.session) is channel:
            del self._channels[channel.session]
        task = asyncio.create_task(channel.wait_closed())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
