"""All tools of a worker without sandboxes: toolcrew's web tools, operators' tools, and MCP servers over HTTP."""

from collections.abc import Sequence

from toolcrew.contract.settings import WebSettings, WorkerSettings, copy_environment, read_environment
from toolcrew.store.connection import connect_once
from toolcrew.store.tool_state import StateStore
from toolcrew.store.web_pages import PageCache
from toolcrew.workers.custom.loading import load_custom_tools
from toolcrew.workers.mcp.server_registry import ToolSource
from toolcrew.workers.mcp.settings import HttpEntry, load_servers
from toolcrew.workers.tools.base import WorkerTool
from toolcrew.workers.web.resolver import SystemResolver
from toolcrew.workers.web.tools import build_access_rules, build_web_tools
from toolcrew.workers.web.webhook import build_webhook


def load_web_worker_tools(settings: WorkerSettings) -> tuple[WorkerTool, ...]:
    """Load all tools, for any queue: a broken operators' tool must stop the start of the worker. Raises ConfigError."""
    broker = settings.broker()
    # `connect_once` sends a command only once: an unavailable Redis must not delay every fetch.
    cache = PageCache(connect_once(broker), settings.deployment)
    custom = load_custom_tools(settings.tool_modules, config=settings.tool_config)
    web = read_environment(WebSettings)
    # Models do not get `webhook.send`. Only orchestrators call it.
    webhook = build_webhook(SystemResolver(), build_access_rules(web))
    return (*build_web_tools(web, cache), webhook, *custom)


def load_web_worker_servers(settings: WorkerSettings) -> Sequence[ToolSource]:
    """Return the MCP servers over HTTP, without contacting any server. Raises ConfigError."""
    servers = load_servers(settings.mcp_servers, HttpEntry, copy_environment())
    if not servers:
        return ()
    # Import late: the MCP SDK costs 30 MiB per process and half a second at the start.
    from toolcrew.workers.mcp.http_sessions import ServerSessions
    from toolcrew.workers.mcp.http_tools import build_http_sources

    broker, keys = settings.broker(), settings.broker().signing_keys()

    def open_sessions(tenant: str, session: str) -> ServerSessions:
        state = StateStore.of(broker).open_server_sessions(tenant, session)
        return ServerSessions(state, keys, f"{tenant} {session}")

    return build_http_sources(servers, read_environment(WebSettings), open_sessions=open_sessions)
