"""Tools of MCP servers over stdio, offered by the worker of a sandbox host."""

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from toolcrew.contract.errors import OperatorError, SandboxUnavailable, ToolFailure
from toolcrew.contract.guest_protocol import (
    A,
    FailedAnswer,
    GuestReply,
    GuestRequest,
    InvalidGuestAnswer,
    parse_error,
    parse_guest_answer,
)
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.mcp.answers import build_outcome
from toolcrew.workers.mcp.imports import ImportedTool, import_tools
from toolcrew.workers.mcp.sandbox_server import SandboxServer
from toolcrew.workers.mcp.settings import StdioEntry
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool

log = structlog.get_logger(__name__)

DISCOVERY_S = 15.0
SANDBOX_TTL_S = 60.0
OWN_TENANT = "mcp-discovery"
AWAIT_S = 30.0
"""Maximum time to wait for a sandboxd that is starting, in seconds."""
_RETRY_S = 0.5
AT_ONCE = 4
"""Maximum number of sandboxes for listing at a time. A host that starts also creates other sandboxes."""


@dataclass
class SandboxSource:
    """A server over stdio, as a source for workers/mcp/server_registry.py. A separate sandbox, which is removed
    afterwards, lists the server's tools.
    """

    server: SandboxServer
    socket: Path

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
        # Use a separate object: running calls read `is_sessionless` of the shared one, which must not change during the
        # listing.
        probe = SandboxServer(self.server.name, self.server.entry)
        with SandboxClient(self.socket) as client:
            listed = _list_in_own_sandbox(probe, client)
        self.is_sessionless = probe.is_sessionless
        return listed

    def import_tools(self, listed: Iterable[Any]) -> tuple[ImportedTool, ...]:
        return import_tools(self.server.name, self.server.entry, listed, "sandbox")

    def end_session(self, tenant: str, session: str) -> bool:
        # The server ends with its sandbox.
        return False

    def build(self, tool: ImportedTool) -> WorkerTool:
        server = self.server

        def handle(arguments: dict[str, Any], environment: ToolEnvironment) -> Outcome:
            limit_s = min(environment.context.timeout_s, server.entry.timeout_s)
            result = server.call_tool(environment.run, tool.name, arguments, environment.context.cwd, limit_s)
            return build_outcome(server.name, tool.spec.name, result)

        return WorkerTool(tool.spec, handle)


def build_sandbox_sources(servers: Mapping[str, StdioEntry], socket: Path) -> tuple[SandboxSource, ...]:
    """Return a source for every server. This function starts no sandbox."""
    return tuple(SandboxSource(SandboxServer(name, entry), socket) for name, entry in servers.items())


def await_sandboxd(socket: Path) -> None:
    """Wait for sandboxd. Also returns at the time limit; then each server reports the problem."""
    until = time.monotonic() + AWAIT_S
    with SandboxClient(socket) as client:
        while time.monotonic() < until:
            try:
                client.status()
            except OperatorError:
                time.sleep(_RETRY_S)
            else:
                return


def _list_in_own_sandbox(server: SandboxServer, client: SandboxClient) -> list[Any]:
    sandbox = f"{OWN_TENANT}:{secrets.token_hex(8)}"
    spec = SessionSpec(image=server.entry.image, ttl_s=SANDBOX_TTL_S, network="none")
    client.describe_open(sandbox, spec)
    try:
        return server.list_tools(partial(_run, client, sandbox), min(server.entry.timeout_s, DISCOVERY_S))
    finally:
        try:
            client.close(sandbox)
        except (ToolFailure, OperatorError) as error:
            # The listing has succeeded, so ignore the error: the sandbox expires by itself.
            log.warning("mcp_sandbox_not_closed", server=server.name, error=str(error))


def _run(client: SandboxClient, sandbox: str, request: GuestRequest[A], body: bytes) -> GuestReply[A]:
    """Run a request in the sandbox, as a tool environment does for the calls of sessions."""
    response = client.call(sandbox, request.as_header(), body)
    try:
        answer = parse_guest_answer(request, response.done)
    except InvalidGuestAnswer as error:
        raise SandboxUnavailable(f"the sandbox returned an invalid answer ({error}): check its image") from None
    if isinstance(answer, FailedAnswer):
        code, message, figures = parse_error(answer)
        raise ToolFailure(code, message, **figures)
    return GuestReply(answer, response.streams)
