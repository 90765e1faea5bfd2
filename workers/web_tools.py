"""Every tool that a worker without sandboxes may have: our web tools, those of operators, and the MCP servers over
HTTP.
"""

from collections.abc import Sequence

from store.connection import connect_once
from store.web_pages import PageCache
from workers.custom.loading import load_custom_tools
from workers.mcp.server_registry import Source
from workers.mcp.settings import HttpEntry, load_servers
from workers.settings import WorkerSettings, load_web_settings
from workers.tools.base import WorkerTool
from workers.web.resolver import SystemResolver
from workers.web.tools import build_egress_rules, build_web_tools
from workers.web.webhook import build_webhook


def load_web_worker_tools(settings: WorkerSettings) -> tuple[WorkerTool, ...]:
    """Loads all of them, whatever queues are served: operators' tools that are broken must be loud. Raises
    ConfigError.
    """
    broker = settings.broker()
    # Once: a Redis that is away must not hold up every fetch.
    cache = PageCache(connect_once(broker), settings.deployment)
    custom = load_custom_tools(settings.tool_modules, config=settings.tool_config)
    web = load_web_settings()
    # webhook.send is no tool of models: orchestrators call it.
    webhook = build_webhook(SystemResolver(), build_egress_rules(web))
    return (*build_web_tools(web, cache), webhook, *custom)


def load_web_worker_servers(settings: WorkerSettings) -> Sequence[Source]:
    """The MCP servers over HTTP; none has been asked. Raises ConfigError."""
    servers = load_servers(settings.mcp_servers, HttpEntry)
    if not servers:
        return ()
    # The SDK takes 30 MiB of every process and half a second of the start.
    from workers.mcp.http_tools import build_http_sources

    return build_http_sources(servers, load_web_settings())
