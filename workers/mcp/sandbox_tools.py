"""The tools of MCP servers over stdio, as the worker of a sandbox host registers them."""

import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from contract.errors import OperatorError, SandboxUnavailable, ToolFailure
from workers.guest_answers import GuestNonsense, parse_error, parse_told
from workers.mcp.answers import build_outcome
from workers.mcp.imports import ImportedTool, import_tools
from workers.mcp.sandbox_server import SandboxServer
from workers.mcp.settings import StdioEntry
from workers.sandbox_client import GuestResponse, SandboxClient
from workers.tools.base import Handler, Outcome, Workbench, WorkerRegistry, WorkerTool

log = structlog.get_logger(__name__)

DISCOVERY_S = 15.0
SANDBOX_TTL_S = 60.0
OWN_TENANT = "mcp-discovery"
AWAIT_S = 30.0
"""How long a sandboxd that is just being started is waited for."""
_AGAIN_S = 0.5
MAX_AT_ONCE = 4
"""Sandboxes for asking; a host that starts has others to make as well."""


def register_sandbox_servers(registry: WorkerRegistry, servers: Mapping[str, StdioEntry], socket: Path) -> None:
    """Asks each server over stdio for its tools, in a sandbox of its own that is removed then. One that cannot be asked is logged, and costs its own
    tools only, until the worker is started again."""
    asked = [SandboxServer(name, entry) for name, entry in servers.items()]
    if not asked:
        return
    _await_sandboxd(socket)
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        found = list(pool.map(lambda server: _discover(server, socket), asked))
    for server, tools in zip(asked, found, strict=True):
        for tool in tools:
            if registry.get(tool.spec.name) is not None:
                log.error("mcp_tool_left_out", server=server.name, name=tool.spec.name, why="another tool has its name")
            else:
                registry.register(WorkerTool(tool.spec, _build_handler(server, tool)))


def _await_sandboxd(socket: Path) -> None:
    """Returns also when it does not come: then each server says so."""
    until = time.monotonic() + AWAIT_S
    with SandboxClient(socket) as client:
        while time.monotonic() < until:
            try:
                client.status()
            except OperatorError:
                time.sleep(_AGAIN_S)
            else:
                return


def _discover(server: SandboxServer, socket: Path) -> tuple[ImportedTool, ...]:
    started = time.monotonic()
    try:
        with SandboxClient(socket) as client:
            listed = _ask_in_own_sandbox(server, client)
    except (ToolFailure, OperatorError) as error:
        log.error("mcp_server_without_tools", server=server.name, error=str(error))
        return ()
    tools = import_tools(server.name, server.entry, listed, "sandbox")
    log.info("mcp_tools_found", server=server.name, tools=[tool.spec.name for tool in tools], took_s=round(time.monotonic() - started, 3))
    return tools


def _ask_in_own_sandbox(server: SandboxServer, client: SandboxClient) -> list[Any]:
    sandbox = f"{OWN_TENANT}:{secrets.token_hex(8)}"
    client.describe_open(sandbox, server.entry.image, SANDBOX_TTL_S, network="none")
    try:
        return server.list_tools(partial(_run, client, sandbox), min(server.entry.timeout_s, DISCOVERY_S))
    finally:
        try:
            client.close(sandbox)
        except (ToolFailure, OperatorError) as error:
            # What was asked has been answered; the sandbox ends by itself.
            log.warning("mcp_sandbox_not_closed", server=server.name, error=str(error))


def _run(client: SandboxClient, sandbox: str, request: Mapping[str, Any], body: bytes) -> GuestResponse:
    """As a bench does it for the calls of sessions."""
    response = client.call(sandbox, request, body)
    try:
        told = parse_told(request, response.done)
    except GuestNonsense as nonsense:
        raise SandboxUnavailable(f"the sandbox gave an answer that is none ({nonsense}): see that its image is sound") from None
    if told.error is not None:
        code, words, figures = parse_error(told)
        raise ToolFailure(code, words, **figures)
    return response


def _build_handler(server: SandboxServer, tool: ImportedTool) -> Handler:
    def handle(arguments: dict[str, Any], bench: Workbench) -> Outcome:
        limit_s = min(bench.context.timeout_s, server.entry.timeout_s)
        result = server.call_tool(bench.run, tool.name, arguments, bench.context.cwd, limit_s)
        return build_outcome(server.name, tool.spec.name, result)

    return handle
