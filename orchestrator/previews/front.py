"""The listener of previews: finds the sandbox of a host name, and decides who may use its port."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import h11

from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.previews import PreviewSite, PreviewTicket, open_preview_ticket
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.previews.connection import PIECE_BYTES, ClientConnection, build_answer
from toolcrew.orchestrator.previews.messages import COOKIE, RefusedMessage, RequestHead
from toolcrew.orchestrator.previews.upstream import Upstream
from toolcrew.orchestrator.streams import Stream, StreamTarget
from toolcrew.store.previews import Preview

MAX_CONNECTIONS = 1000
MAX_UPSTREAMS_PER_TENANT = 128
_MAX_TICKETS = 4

FindPreview = Callable[[str], Awaitable[Preview | None]]
OpenPort = Callable[[StreamTarget, int], Awaitable[Stream]]


class PreviewFront:
    """Serves the previews of a deployment. `find`: returns a preview by its id. `open_port`: opens a stream."""

    def __init__(self, site: PreviewSite, keys: SigningKeys, find: FindPreview, open_port: OpenPort) -> None:
        self._site, self._keys = site, keys
        self._find, self._open_port = find, open_port
        self._connections: dict[asyncio.StreamWriter, ClientConnection] = {}
        self._upstreams: Counter[str] = Counter()

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to accept connections. Raises OSError."""
        return await asyncio.start_server(self._serve, host, port, limit=PIECE_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _end_when_unreachable(writer)
        connection = ClientConnection(reader, writer, self._site.scheme, self._admit, self._connect)
        self._connections[writer] = connection
        if len(self._connections) > MAX_CONNECTIONS:
            # Clients that only hold connections open must not keep others away.
            idle = (other for other, kept in self._connections.items() if kept.is_idle)
            next(idle, writer).transport.abort()
        try:
            await connection.serve()
        finally:
            del self._connections[writer]

    def close(self) -> None:
        """Close all connections."""
        for writer in self._connections:
            writer.transport.abort()

    async def _admit(self, head: RequestHead) -> h11.Response | None:
        """Return the front's own answer, or None for a request that may pass. Raises RefusedMessage, OperatorError."""
        preview, port = self._locate(head)
        text, ticket = self._find_ticket(head, preview, port)
        if ticket is None:
            record = await self._find(preview)
            # A preview that does not exist answers like one that needs a ticket.
            if record is None or record.access != "public":
                raise RefusedMessage(401, "this address needs a ticket: ask for a new address of the port")
        elif head.has_query_ticket and head.is_navigation:
            return self._redirect(head, text, ticket)
        elif not head.has_query_ticket and head.is_from_elsewhere(self._site.build_address(preview, port)):
            raise RefusedMessage(403, "a page of another origin may not use this address: open it as a page")
        return None

    async def _connect(self, head: RequestHead) -> Upstream:
        preview, port = self._locate(head)
        record = await self._find(preview)
        if record is None:
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, "the preview has expired: ask for a new address of the port")
        tenant = record.tenant
        if self._upstreams[tenant] >= MAX_UPSTREAMS_PER_TENANT:
            raise RefusedMessage(503, "the previews of this tenant have too many open connections: close some")
        self._upstreams[tenant] += 1
        release = partial(self._release, tenant)
        try:
            stream = await self._open_port(StreamTarget(tenant, record.session, record.actor), port)
        except BaseException:
            release()
            raise
        return Upstream(stream, release)

    def _release(self, tenant: str) -> None:
        self._upstreams[tenant] -= 1
        if not self._upstreams[tenant]:
            del self._upstreams[tenant]

    def _locate(self, head: RequestHead) -> tuple[str, int]:
        found = self._site.find(head.host)
        if found is None:
            raise RefusedMessage(421, "no preview has this host name: use the address as it was given to you")
        return found

    def _find_ticket(self, head: RequestHead, preview: str, port: int) -> tuple[str, PreviewTicket | None]:
        """Return the first ticket that is valid for this port now, as text and as record."""
        for text in head.tickets[:_MAX_TICKETS]:
            with suppress(EnvelopeRefused):
                ticket = open_preview_ticket(self._keys, text)
                if (ticket.preview, ticket.port) == (preview, port) and ticket.expires_at > time.time():
                    return text, ticket
        return "", None

    def _redirect(self, head: RequestHead, text: str, ticket: PreviewTicket) -> h11.Response:
        """Return the answer that stores the ticket in a cookie and removes it from the address."""
        cookie = (
            f"{COOKIE.decode()}={text}; Max-Age={max(1, int(ticket.expires_at - time.time()))}; "
            "Path=/; Secure; HttpOnly; SameSite=Lax"
        )
        address = self._site.build_address(ticket.preview, ticket.port).encode() + head.target
        return build_answer(
            302,
            (b"location", address),
            (b"set-cookie", cookie.encode()),
            (b"referrer-policy", b"no-referrer"),
        )


def _end_when_unreachable(writer: asyncio.StreamWriter) -> None:
    """Let the kernel end a connection whose client does not answer any more, also while nothing is sent."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
