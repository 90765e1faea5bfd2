"""A gateway in this process, with fake sandboxes, and clients over real TLS connections."""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tests.support.streams.fake_sandboxes import FakeSandboxd
from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_gateways import StreamGateway
from toolcrew.contract.stream_protocol import WINDOW_BYTES, FrameKind
from toolcrew.contract.stream_tickets import StreamTicket, seal_ticket
from toolcrew.orchestrator.streams.connection import GatewayConnection, open_connection
from toolcrew.orchestrator.streams.stream import Stream, StreamReply
from toolcrew.workers.stream_gateway.certificate import make_certificate
from toolcrew.workers.stream_gateway.daemon import Listener
from toolcrew.workers.stream_gateway.gateway import StreamGatewayServer
from toolcrew.workers.stream_gateway.limits import StreamLimits
from toolcrew.workers.stream_gateway.tickets import TicketGate

KEYS = SigningKeys.of("a secret of the tests", deployment="tests")
QUEUE = "host.tests.boot"


class GatewayHarness:
    """The gateway, and what its clients need to know."""

    def __init__(self, limits: StreamLimits | None = None, keys: SigningKeys = KEYS) -> None:
        self.now = 1_000_000.0
        self.sandboxd = FakeSandboxd()
        self.certificate = make_certificate()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.gateway = StreamGateway(
            id=secrets.token_hex(16),
            queue=QUEUE,
            addresses=("127.0.0.1",),
            port=self.listener.getsockname()[1],
            certificate=self.certificate.digest,
            started_at=self.now,
        )
        gate = TicketGate(keys, self.gateway.id, QUEUE, lambda: self.now)
        self.server = StreamGatewayServer(keys, self.certificate.digest, gate, self.sandboxd.open, limits)
        self._accepting = asyncio.create_task(Listener(self.server, self.certificate).accept(self.listener))
        self._connections: list[GatewayConnection] = []

    async def connect(self, keys: SigningKeys = KEYS, **changes: Any) -> GatewayConnection:
        """Return a new connection of a client. `changes`: of the record that it has read."""
        connection = await open_connection(keys, self.gateway.model_copy(update=changes))
        self._connections.append(connection)
        return connection

    def ticket(self, *, keys: SigningKeys = KEYS, **changes: Any) -> str:
        """Return a ticket for session s of tenant t."""
        fields: dict[str, Any] = {
            "tenant": "t",
            "session": "s",
            "fence": 1,
            "queue": QUEUE,
            "gateway": self.gateway.id,
            "actor": "key",
            "may": ("process", "files:read", "files:write", "port:80"),
            "expires_at": self.now + 30,
            "nonce": secrets.token_hex(16),
        }
        return seal_ticket(keys, StreamTicket.model_validate(fields | changes))

    def begin(
        self,
        connection: GatewayConnection,
        *argv: str,
        ticket: str | None = None,
        window: int = WINDOW_BYTES,
        opening: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Begin to open a stream of a fake process."""
        fields = opening or {"what": "process", "argv": list(argv)}
        payload = json.dumps({"ticket": ticket or self.ticket(), "open": fields}).encode()
        return Stream(connection, payload, window)

    async def open(self, connection: GatewayConnection, *argv: str, **options: Any) -> Stream:
        """Open a stream of a fake process. `options`: of `begin`."""
        stream = self.begin(connection, *argv, **options)
        async with asyncio.timeout(30):
            await stream.wait_opened()
        return stream

    async def call(self, connection: GatewayConnection, request: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """Make a request."""
        reply = StreamReply()
        payload = json.dumps({"ticket": self.ticket(**changes), "call": dict(request)}).encode()
        connection.begin(reply, FrameKind.CALL, payload)
        async with asyncio.timeout(30):
            return await reply.answer

    async def wait_for_gateway(self, connection: GatewayConnection) -> None:
        """Return when the gateway has processed everything that was sent on the connection."""
        with contextlib.suppress(ToolFailure):
            await self.call(connection, {"op": "stat"}, may=())

    async def close(self) -> None:
        """Stop the gateway and all connections."""
        for connection in self._connections:
            connection.connection.end("the test ends")
        await cancel_all([self._accepting])
        await self.server.close()
        for server in self.sandboxd.servers.values():
            server.connection.end("the test ends")
        self.listener.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def open_gateway(limits: StreamLimits | None = None, keys: SigningKeys = KEYS) -> AsyncIterator[GatewayHarness]:
    """Run a gateway for one test."""
    harness = GatewayHarness(limits, keys)
    try:
        yield harness
    finally:
        await harness.close()


async def read_all(stream: Stream, size: int | None = None) -> bytes:
    """Return the bytes up to the end of a stream, or its next `size` bytes."""
    data = b""
    async with asyncio.timeout(60):
        while size is None or len(data) < size:
            piece = await stream.read()
            if piece is None:
                break
            data += piece.data
    return data
