"""MCP on a real stack: two replicas over HTTP, programs over stdio, and the client of the SDK for both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
from docker import APIClient
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ElicitRequestParams, ElicitResult

from tests.support.api.api_harness import make_keys
from tests.support.stack.service_process import ApiProcess, open_service
from tests.support.stack.stack import TOOLCREW, Stack, commands_in, open_stack
from tests.support.stack.waiting import SOON_S

SESSION = "toolcrew/session"
REVISIONS = ("2026-07-28", "legacy")
"""Names of the protocol revisions in the SDK's client: the current revision, and the handshake of earlier revisions."""


@dataclass
class McpStack:
    """Two HTTP server processes with the same content in `servers`. `keys`: by role, as in tests/support/api/api_harness.py."""

    stack: Stack
    servers: tuple[ApiProcess, ApiProcess]
    keys: dict[str, str]

    @contextlib.asynccontextmanager
    async def client(
        self, name: str = "acme", replica: int = 0, session: str = "", **options: Any
    ) -> AsyncIterator[Client]:
        """Yield a client. `session`: part of the address. `options`: of the SDK's client."""
        path = f"/mcp/{session}" if session else "/mcp"
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        async with httpx2.AsyncClient(headers=headers, timeout=SOON_S) as line:
            transport = streamable_http_client(self.servers[replica].url + path, http_client=line)
            async with Client(transport, **{"mode": REVISIONS[0], **options}) as client:
                yield client

    @contextlib.asynccontextmanager
    async def stdio_client(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[Client]:
        """Yield a client of a separate program over stdio."""
        env = self.stack.footprint.environment({"TOOLCREW_REDIS_URL": self.stack.redis_url, **(environment or {})})
        server = StdioServerParameters(command=TOOLCREW, args=["serve", "mcp", *arguments], env=env)
        async with Client(server, **{"mode": REVISIONS[0], **options}) as client:
            yield client

    def find_programs(self, text: str) -> list[str]:
        """Return the programs in any sandbox whose command line contains `text`."""
        containers = self.stack.footprint.containers()
        return [command for container in containers for command in commands_in(container).values() if text in command]


def open_mcp_process(
    stack: Stack, *arguments: str, environment: Mapping[str, str] | None = None
) -> "contextlib.AbstractContextManager[ApiProcess]":
    """Run MCP over HTTP, connected, and stop the process on exit."""
    settings = {"TOOLCREW_REDIS_URL": stack.redis_url, **(environment or {})}
    return open_service(stack.footprint, "mcp_serving", settings, ["mcp", *arguments, "--http"])


@contextlib.contextmanager
def open_mcp_stack(engine: APIClient) -> Iterator[McpStack]:
    """Open the stack and remove everything of the stack on exit."""
    with open_stack(engine) as stack:
        keys = asyncio.run(make_keys(stack.redis_url))
        with open_mcp_process(stack) as one, open_mcp_process(stack) as other:
            yield McpStack(stack, (one, other), keys)
            for server in (one, other):
                assert "Traceback" not in server.log(), server.log()
        assert stack.end() == 0
        stack.footprint.assert_nothing_left()


async def bash(client: Client, command: str, session: str = "", **options: Any) -> CallToolResult:
    """Call bash. `session`: sent in the call's `_meta`."""
    meta: Any = {SESSION: session} if session else None
    return await client.call_tool("bash_tool", {"command": command}, meta=meta, **options)


async def new_session(client: Client) -> str:
    """Open a session that stays open after the call that opened the session."""
    opened = await bash(client, "true", session="new")
    assert not opened.is_error, opened.content
    return str((opened.meta or {})[SESSION])


def text_of(result: CallToolResult) -> str:
    return "".join(getattr(part, "text", "") for part in result.content)


class ElicitingUser:
    """A user of a client who answers the server's questions."""

    def __init__(self, **content: Any) -> None:
        self.content = content
        self.questions: list[str] = []

    async def __call__(self, _: object, params: ElicitRequestParams) -> ElicitResult:
        self.questions.append(params.message)
        return ElicitResult(action="accept", content=self.content)
