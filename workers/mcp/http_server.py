"""One MCP server over streamable HTTP: the SDK's session for each call, over a transport that is judged and bounded."""

import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import httpx2
import mcp_types as types
from anyio.from_thread import start_blocking_portal
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

from contract.errors import ErrorCode, ToolFailure
from workers.mcp.http_transport import JudgedTransport
from workers.mcp.messages import broken
from workers.mcp.pages import ToolPages
from workers.mcp.settings import HttpEntry
from workers.web.addresses import AddressRules
from workers.web.connections import build_tls
from workers.web.egress import EgressRules
from workers.web.limits import Deadline, FetchLimits
from workers.web.resolver import Resolver, SystemResolver

T = TypeVar("T")
Ask = Callable[[types.Request[Any, Any]], Awaitable[dict[str, Any]]]
"""Sends a request and gives its result as it came. Raises MCPError."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_CLIENT = types.Implementation(name="toolcrew", version="1")
_KNOWN = types.DiscoverResult(
    supported_versions=list(MODERN_PROTOCOL_VERSIONS), capabilities=types.ServerCapabilities()
)


class RawResults(JSONRPCDispatcher[TransportContext]):
    """Keeps the last result as it came: the session refuses a whole list for one tool that breaks the schema."""

    method = ""
    result: dict[str, Any]

    async def send_raw_request(self, method: str, *args: Any, **options: Any) -> dict[str, Any]:
        """Send and wait, as the SDK's."""
        self.method = method
        self.result = await super().send_raw_request(method, *args, **options)
        return self.result


@dataclass
class HttpServer:
    """Calls are made one at a time by a process. `addresses`: the operator's rules beside the tables of private
    networks.
    """

    name: str
    entry: HttpEntry
    addresses: AddressRules = field(default_factory=AddressRules)
    resolver: Resolver = field(default_factory=SystemResolver)
    tls: ssl.SSLContext = field(default_factory=build_tls)
    stands_alone: bool | None = None
    """Whether the peer speaks a revision where every request stands alone; None: it has not been asked."""

    def list_tools(self, deadline: Deadline) -> list[Any]:
        """What it lists, unchecked. Raises ToolFailure."""

        async def work(ask: Ask) -> list[Any]:
            pages = ToolPages(self.name)
            while pages.cursor is not None:
                params = types.PaginatedRequestParams(cursor=pages.cursor or None)
                pages.add(await ask(types.ListToolsRequest(params=params)))
            return pages.listed

        return self._talk(work, deadline)

    def call_tool(self, tool: str, arguments: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The result, unchecked but for being an object. Raises ToolFailure."""
        # Half of a surrogate pair, which JSON can write, cannot be encoded.
        given = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
        is_sent = False

        async def work(ask: Ask) -> dict[str, Any]:
            nonlocal is_sent
            is_sent = True
            return await ask(types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=given)))

        try:
            return self._talk(work, deadline)
        except ToolFailure as failure:
            raise (_maybe_done(failure) if is_sent else failure) from None

    def _talk(self, work: Callable[[Ask], Awaitable[T]], deadline: Deadline) -> T:
        transport = self._judge(deadline)
        # In a thread of its own, as workers/web/exchange.py does it.
        with start_blocking_portal(name="mcp") as portal:
            results = portal.call(self._converse, transport, work, deadline)
        if transport.failure is not None:
            raise transport.failure
        if not results:
            raise deadline.passed(f"waiting for the MCP server {self.name}")
        return results[0]

    def _judge(self, deadline: Deadline) -> JudgedTransport:
        """The way to the server. Its name is looked up once for each conversation. Raises ToolFailure."""
        target = self.entry.target()
        rules = EgressRules(
            self.addresses, frozenset({target.port}), frozenset({target.host} if self.entry.private else ())
        )
        rules.check_target(target)
        addresses = (
            (target.literal,)
            if target.literal is not None
            else self.resolver.resolve(target.host, deadline, FetchLimits.resolve_s)
        )
        rules.check_addresses(target, addresses)
        return JudgedTransport(self.name, target, addresses, self.tls, deadline)

    async def _converse(
        self, transport: JudgedTransport, work: Callable[[Ask], Awaitable[T]], deadline: Deadline
    ) -> list[T]:
        """The one result. None when `transport` has a failure, or the deadline has passed."""
        headers = {name: value.get_secret_value() for name, value in self.entry.headers.items()}
        results: list[T] = []
        with anyio.move_on_after(deadline.left(f"waiting for {self.name}")) as scope:
            transport.end = scope.cancel
            async with (
                httpx2.AsyncClient(transport=transport, headers=headers, timeout=None, trust_env=False) as client,
                streamable_http_client(self.entry.url, http_client=client) as (read, write),
            ):
                dispatcher = RawResults(read, write)
                async with ClientSession(dispatcher=dispatcher, client_info=_CLIENT) as session:
                    try:
                        await self._greet(session)
                        results.append(await work(partial(_ask, session, dispatcher)))
                    except ToolFailure as failure:
                        transport.failure = transport.failure or failure
                    except (MCPError, ValidationError, RuntimeError) as error:
                        transport.failure = (
                            transport.failure or transport.refusal or self._explain(dispatcher.method, error)
                        )
        return results

    async def _greet(self, session: ClientSession) -> None:
        """Raises what the SDK raises."""
        alone, self.stands_alone = self.stands_alone, None
        # Whoever answers first may not be the server, as a proxy before one that is just being started: until its
        # greeting succeeds, nothing is known of it.
        if alone is None:
            try:
                await session.discover()
                alone = True
            except (MCPError, ValidationError, RuntimeError):
                alone = False
        elif alone:
            session.adopt(_KNOWN)
        if not alone:
            await session.initialize()
        self.stands_alone = alone

    def _explain(self, method: str, error: Exception) -> ToolFailure:
        if not isinstance(error, MCPError):
            return broken(self.name, "it speaks no revision that is known here")
        if error.code == types.UNSUPPORTED_PROTOCOL_VERSION:
            self.stands_alone = None
        return ToolFailure(
            ErrorCode.HTTP_ERROR,
            f"the MCP server {self.name} refused {method}: {error.message}",
            mcp_code=error.code,
        )


async def _ask(session: ClientSession, dispatcher: RawResults, request: types.Request[Any, Any]) -> dict[str, Any]:
    """The result as it came. Raises MCPError."""
    with suppress(ValidationError):
        await session.send_request(request, _ANY)
    return dispatcher.result


def _maybe_done(failure: ToolFailure) -> ToolFailure:
    """A call whose answer did not come may have acted."""
    if failure.code not in (ErrorCode.TIMEOUT, ErrorCode.FILE_TOO_LARGE) and failure.metadata.get("cause") not in (
        "reset",
        "protocol",
    ):
        return failure
    return ToolFailure(
        failure.code,
        f"{failure.message}; the call may or may not have acted: look before you repeat it",
        **failure.metadata,
    )
