"""The tools of MCP servers over HTTP, as a worker of the pool of operators' tools registers them."""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from contract.errors import ToolFailure
from workers.mcp.answers import build_outcome
from workers.mcp.http_server import HttpServer
from workers.mcp.imports import ImportedTool, import_tools
from workers.mcp.settings import HttpEntry
from workers.settings import WebSettings
from workers.tools.base import Handler, Outcome, Workbench, WorkerTool
from workers.web.addresses import AddressRules
from workers.web.connections import build_tls
from workers.web.limits import Deadline
from workers.web.resolver import Resolver, SystemResolver

log = structlog.get_logger(__name__)

DISCOVERY_S = 15.0
"""At most, for asking a server which tools it has; all are asked at the same time."""


def load_http_tools(
    servers: Mapping[str, HttpEntry], settings: WebSettings, taken: Collection[str] = (), resolver: Resolver | None = None
) -> tuple[WorkerTool, ...]:
    """Asks each server over HTTP for its tools. One that does not answer is logged, and costs its own tools only, until the worker is started again.
    `taken`: names that other tools have."""
    addresses, tls = AddressRules(settings.webfetch_refuse_ranges, settings.webfetch_nat64_prefix), build_tls()
    asked = [HttpServer(name, entry, addresses, resolver or SystemResolver(), tls) for name, entry in servers.items()]
    if not asked:
        return ()
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(_discover, asked))
    return tuple(tool for server, tools in zip(asked, found, strict=True) for tool in _served(server, tools, taken))


def _discover(server: HttpServer) -> tuple[ImportedTool, ...]:
    started = time.monotonic()
    try:
        listed = server.list_tools(Deadline(min(server.entry.timeout_s, DISCOVERY_S)))
    except ToolFailure as failure:
        log.error("mcp_server_without_tools", server=server.name, error=failure.message)
        return ()
    tools = import_tools(server.name, server.entry, listed, "tools")
    log.info("mcp_tools_found", server=server.name, tools=[tool.spec.name for tool in tools], took_s=round(time.monotonic() - started, 3))
    return tools


def _served(server: HttpServer, tools: Sequence[ImportedTool], taken: Collection[str]) -> list[WorkerTool]:
    for tool in tools:
        if tool.spec.name in taken:
            log.error("mcp_tool_left_out", server=server.name, name=tool.spec.name, why="an operator's own tool has its name")
    return [WorkerTool(tool.spec, _build_handler(server, tool)) for tool in tools if tool.spec.name not in taken]


def _build_handler(server: HttpServer, tool: ImportedTool) -> Handler:
    def handle(arguments: dict[str, Any], bench: Workbench) -> Outcome:
        result = server.call_tool(tool.name, arguments, Deadline(min(bench.context.timeout_s, server.entry.timeout_s)))
        return build_outcome(server.name, tool.spec.name, result)

    return handle
