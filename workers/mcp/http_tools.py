"""Tools of MCP servers over HTTP, offered by a worker of the pool `tools`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolcrew.contract.settings import WebSettings
from toolcrew.workers.mcp.answers import build_outcome
from toolcrew.workers.mcp.http_server import HttpServer
from toolcrew.workers.mcp.http_sessions import OpenSessions, ServerSessions
from toolcrew.workers.mcp.imports import ImportedTool, import_tools
from toolcrew.workers.mcp.settings import HttpEntry
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.resolver import SystemResolver

LOST_SESSION = "[the server had lost its session: what earlier calls set up there is gone]"
DISCOVERY_S = 15.0
"""Maximum time to list the tools of a server, in seconds."""


@dataclass
class HttpSource:
    """A server over HTTP, as a source for workers/mcp/server_registry.py."""

    server: HttpServer
    open_sessions: OpenSessions | None = None
    """Returns the stored MCP sessions of a session; None: every call opens its own."""

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def is_sessionless(self) -> bool | None:
        return self.server.is_sessionless

    @is_sessionless.setter
    def is_sessionless(self, value: bool | None) -> None:
        self.server.is_sessionless = value

    def list_tools(self) -> list[Any]:
        return self.server.list_tools(Deadline(min(self.server.entry.timeout_s, DISCOVERY_S)))

    def import_tools(self, listed: Iterable[Any]) -> tuple[ImportedTool, ...]:
        return import_tools(self.server.name, self.server.entry, listed, "tools")

    def end_session(self, tenant: str, session: str) -> bool:
        stored = self.open_sessions(tenant, session).find(self.name, self.server.entry) if self.open_sessions else None
        if stored is not None:
            self.server.end_session(stored)
        return stored is not None

    def _sessions(self, environment: ToolEnvironment) -> ServerSessions | None:
        context = environment.context
        if self.open_sessions is None or context.session is None:
            return None
        return self.open_sessions(context.tenant, context.session)

    def build(self, tool: ImportedTool) -> WorkerTool:
        server = self.server

        def handle(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
            deadline = Deadline(min(environment.context.timeout_s, server.entry.timeout_s))
            done = server.call_tool(tool.name, arguments, deadline, self._sessions(environment))
            outcome = build_outcome(server.name, tool.spec.name, done.result)
            return replace(outcome, output=f"{outcome.output}\n{LOST_SESSION}") if done.is_new else outcome

        return WorkerTool(tool.spec, handle)


def build_http_sources(
    servers: Mapping[str, HttpEntry],
    settings: WebSettings,
    open_sessions: OpenSessions | None = None,
) -> tuple[HttpSource, ...]:
    """Return a source for every server. This function sends no request."""
    addresses, tls = AddressRules(settings.refuse_ranges, settings.nat64_prefix), build_tls()
    return tuple(
        HttpSource(HttpServer(name, entry, addresses, SystemResolver(), tls), open_sessions)
        for name, entry in servers.items()
    )
