"""An MCP server over streamable HTTP. Every call uses its own conversation of the SDK; the calls of a session of
toolcrew share one session at the server. The transport checks addresses and has limits.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import httpx2
import mcp_types as types
from anyio.from_thread import start_blocking_portal
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.mcp.http_sessions import ServerSession, ServerSessions
from toolcrew.workers.mcp.http_transport import END_S, SESSION_HEADER, CheckedTransport
from toolcrew.workers.mcp.session import REFUSED, SESSIONLESS, RawSession
from toolcrew.workers.mcp.settings import HttpEntry
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.resolver import Resolver, SystemResolver, find_addresses

T = TypeVar("T")


@dataclass(frozen=True)
class ServerResult:
    """Result of a call. `is_new`: the server had lost its session, so the call ran in a new one."""

    result: dict[str, Any]
    is_new: bool = False


@dataclass(frozen=True)
class _SharedSession:
    """The session that the calls of a session of toolcrew share. `stored` None: this call opens it. `lost`: a stored
    session that the server has lost.
    """

    sessions: ServerSessions
    stored: ServerSession | None
    lost: ServerSession | None = None


class _SessionLost(Exception):
    """The server does not know the stored session."""


class _Dispatcher(JSONRPCDispatcher[TransportContext]):
    method = ""
    result: dict[str, Any]

    async def send_raw_request(self, method: str, *args: Any, **options: Any) -> dict[str, Any]:
        self.method = method
        self.result = await super().send_raw_request(method, *args, **options)
        return self.result


@dataclass
class HttpServer:
    """An MCP server over HTTP. A process makes one call at a time. `addresses`: the operator's rules and the tables of
    private networks.
    """

    name: str
    entry: HttpEntry
    addresses: AddressRules = field(default_factory=AddressRules)
    resolver: Resolver = field(default_factory=SystemResolver)
    tls: ssl.SSLContext = field(default_factory=build_tls)
    is_sessionless: bool | None = None
    """True if the server speaks a revision of the protocol without sessions, in which every request stands alone. None:
    not yet known.
    """

    def list_tools(self, deadline: Deadline) -> list[Any]:
        """Return the unchecked list of the server's tools. Raises ToolFailure."""
        return self._exchange(RawSession.gather_tools, deadline)

    def call_tool(
        self, tool: str, arguments: Mapping[str, Any], deadline: Deadline, sessions: ServerSessions | None = None
    ) -> ServerResult:
        """Return the result of the call. Only its type is checked (an object). `sessions`: where the session at the
        server is stored; None: the call gets a session of its own. Raises ToolFailure.
        """
        is_sent = False

        async def call(session: RawSession) -> dict[str, Any]:
            nonlocal is_sent
            is_sent = True
            return await session.use_tool(tool, arguments)

        try:
            if sessions is None:
                return ServerResult(self._exchange(call, deadline))
            return self._call_in_session(call, deadline, sessions)
        except ToolFailure as failure:
            raise (_mark_possibly_done(failure) if is_sent else failure) from None

    def end_session(self, session: ServerSession) -> None:
        """Order the server to end a stored session. Raises ToolFailure."""
        deadline = Deadline(END_S)
        transport = self._open_transport(deadline)
        headers = {**self._headers(), SESSION_HEADER: session.id, "mcp-protocol-version": session.revision}
        with start_blocking_portal(name="mcp") as portal:
            portal.call(transport.end_session, self.entry.url, headers)

    def _call_in_session(
        self, call: Callable[[RawSession], Awaitable[dict[str, Any]]], deadline: Deadline, sessions: ServerSessions
    ) -> ServerResult:
        """Return the result of a call in the stored session. If the server has lost the session, open another one."""
        stored = sessions.find(self.name, self.entry)
        try:
            return ServerResult(self._exchange(call, deadline, _SharedSession(sessions, stored)))
        except _SessionLost:
            # The server refused the call because of the session, so the call has not acted.
            return ServerResult(
                self._exchange(call, deadline, _SharedSession(sessions, None, lost=stored)), is_new=True
            )

    def _exchange(
        self, work: Callable[[RawSession], Awaitable[T]], deadline: Deadline, shared: "_SharedSession | None" = None
    ) -> T:
        transport = self._open_transport(deadline)
        if shared is not None and shared.stored is not None:
            transport.session, transport.keeps_session = shared.stored.id, True
        # The event loop runs in its own thread. An exception in the main thread interrupts a call, and an event loop
        # in the main thread could lose this exception.
        with start_blocking_portal(name="mcp") as portal:
            results = portal.call(self._converse, transport, work, deadline, shared)
        if transport.has_lost_session and shared is not None and shared.stored is not None:
            raise _SessionLost
        if transport.failure is not None:
            raise transport.failure
        if not results:
            raise deadline.passed(f"waiting for the MCP server {self.name}")
        return results[0]

    def _open_transport(self, deadline: Deadline) -> CheckedTransport:
        """Return a transport to the checked addresses of the server. Each conversation resolves the name once. Raises
        ToolFailure.
        """
        target = self.entry.target()
        rules = WebAccessRules(
            self.addresses, frozenset({target.port}), frozenset({target.host} if self.entry.private else ())
        )
        rules.check_target(target)
        addresses = find_addresses(self.resolver, target, deadline, FetchLimits())
        rules.check_addresses(target, addresses)
        return CheckedTransport(self.name, target, addresses, self.tls, deadline)

    async def _converse(
        self,
        transport: CheckedTransport,
        work: Callable[[RawSession], Awaitable[T]],
        deadline: Deadline,
        shared: "_SharedSession | None",
    ) -> list[T]:
        """Run one conversation. Return a list with its result; the list is empty if `transport.failure` is set or the
        deadline has passed.
        """
        headers = self._headers()
        results: list[T] = []
        with anyio.move_on_after(deadline.remaining_s(f"waiting for {self.name}")) as scope:
            # The SDK retries or hides some failures of the transport. So the transport stores its failure and cancels
            # this scope itself.
            transport.end = scope.cancel
            async with (
                httpx2.AsyncClient(transport=transport, headers=headers, timeout=None, trust_env=False) as client,
                streamable_http_client(self.entry.url, http_client=client) as (read, write),
                RawSession(self.name, _Dispatcher(read, write)) as session,
            ):
                try:
                    if shared is not None and shared.stored is not None:
                        session.resume(shared.stored.revision)
                    else:
                        await self._greet(session)
                        await self._share(transport, session, shared)
                    results.append(await work(session))
                except ToolFailure as failure:
                    transport.failure = failure
                except REFUSED as error:
                    if isinstance(error, MCPError) and error.code == types.UNSUPPORTED_PROTOCOL_VERSION:
                        self.is_sessionless = None
                        # The server was replaced by a release that does not know the session's revision.
                        transport.has_lost_session = transport.session is not None
                    transport.failure = transport.refusal or session.explain(error)
        return results

    async def _share(self, transport: CheckedTransport, session: RawSession, shared: "_SharedSession | None") -> None:
        """Store the session that this conversation has opened. If another call was first, use its session."""
        if shared is None or transport.opened is None or session.protocol_version is None:
            return
        opened = ServerSession(transport.opened, session.protocol_version)
        kept = await anyio.to_thread.run_sync(shared.sessions.keep, self.name, self.entry, opened, shared.lost)
        # The SDK ends the session that it has opened, unless the session is kept.
        transport.session, transport.keeps_session = kept.id, kept == opened

    def _headers(self) -> dict[str, str]:
        return {name: value.get_secret_value() for name, value in self.entry.headers.items()}

    async def _greet(self, session: RawSession) -> None:
        """Open the session in the protocol revision that the server speaks. Raises the exceptions of the SDK."""
        # While a server starts, a proxy in front of it may answer in its place. So forget the known revision of the
        # protocol until the server itself has opened a session.
        is_sessionless, self.is_sessionless = self.is_sessionless, None
        if is_sessionless is None:
            is_sessionless = await session.try_adopt_sessionless()
        elif is_sessionless:
            session.adopt(SESSIONLESS)
        if not is_sessionless:
            await session.initialize()
        self.is_sessionless = is_sessionless


def _mark_possibly_done(failure: ToolFailure) -> ToolFailure:
    """Return the failure with a warning if the call may have run: the request was sent, and no response arrived."""
    if failure.code not in (ErrorCode.TIMEOUT, ErrorCode.FILE_TOO_LARGE) and failure.metadata.get("cause") not in (
        "reset",
        "protocol",
    ):
        return failure
    return ToolFailure(
        failure.code,
        f"{failure.message}; the call may or may not have acted: check its effects before you repeat it",
        **failure.metadata,
    )
