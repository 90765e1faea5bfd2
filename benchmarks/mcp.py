"""Measure the time that MCP over HTTP adds to a tool call, compared with the SDK on the same stack.

As in benchmarks/api.py, calls use one persistent connection of a minimal HTTP client. The report also shows the same
calls with the client of the MCP package.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.processes import child_process
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.whole_path import awaited, whole_call
from toolcrew import ToolClient
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis

ROUNDS, WARM_UP = size((200, 20), (2, 1))
REVISION = "2026-07-28"
_ABOUT = {"io.modelcontextprotocol/protocolVersion": REVISION, "io.modelcontextprotocol/clientCapabilities": {}}
_CALL = {"name": "bash_tool", "arguments": {"command": "true"}, "_meta": _ABOUT}
BODY = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": _CALL}).encode()


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    report = Report("mcp", notes=[f"medians of {rounds} interleaved rounds, in one open session"])
    async with contextlib.AsyncExitStack() as stack:
        sdk = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert sdk.stack is not None
        broker = load_settings().broker(sdk.stack.redis_url)
        connection = open_redis(broker)
        stack.push_async_callback(connection.aclose)
        key = (
            await ApiKeys(connection, broker.deployment, broker.signing_keys()).add(DEFAULT_TENANT, name="bench")
        ).text
        port = await stack.enter_async_context(_serving(broker))
        session = await stack.enter_async_context(await sdk.open_session())
        line = await stack.enter_async_context(_open_line(port, f"/mcp/{session.id}", key))
        client = await stack.enter_async_context(_sdk_client(port, session.id, key))
        cases: dict[str, Any] = {
            "nothing": awaited(line.get_health),
            "sdk": awaited(lambda: whole_call(session)),
            "mcp": awaited(line.call),
            "client": awaited(lambda: client.call_tool("bash_tool", {"command": "true"})),
        }
        seconds = await interleave(cases, rounds, WARM_UP)
        report.add_ms("nothing", seconds["nothing"], "floor: GET /healthz")
        report.add_ms("sdk", seconds["sdk"], "bash_tool true by the SDK")
        report.add_ms("mcp", seconds["mcp"], "the same by MCP over HTTP")
        report.add(
            "overhead_ms", (median(seconds["mcp"]) - median(seconds["sdk"])) * 1000, "what MCP adds", at_most=5.0
        )
        report.add("mcp_ratio", median(seconds["mcp"]) / median(seconds["sdk"]), "MCP / SDK")
        report.add_ms("client", seconds["client"], "the same by the protocol's own client")
    return report


class _Line:
    """A persistent HTTP connection, with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, key: str) -> None:
        self._reader = reader
        self._writer = writer
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: "
            "application/json\r\n"
            f"Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: {REVISION}\r\nMcp-Method: "
            "tools/call\r\n"
            f"Mcp-Name: bash_tool\r\nContent-Length: {len(BODY)}\r\n\r\n"
        )
        self._request = head.encode() + BODY

    async def get_health(self) -> None:
        await self._ask(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")

    async def call(self) -> None:
        reply = json.loads(await self._ask(self._request))
        if reply.get("result", {}).get("isError", True):
            raise RuntimeError(f"the call did not succeed: {reply}")

    async def _ask(self, request: bytes) -> bytes:
        self._writer.write(request)
        status, *headers = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        fields = dict(header.lower().split(b": ", 1) for header in headers if header)
        answer = await self._reader.readexactly(int(fields[b"content-length"]))
        if not status.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"{status!r} {answer!r}")
        return answer


@contextlib.asynccontextmanager
async def _open_line(port: int, path: str, key: str) -> AsyncIterator[_Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield _Line(reader, writer, path, key)
    finally:
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def _sdk_client(port: int, session: str, key: str) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as line:
        transport = streamable_http_client(f"http://127.0.0.1:{port}/mcp/{session}", http_client=line)
        async with Client(transport, mode=REVISION) as client:
            yield client


@contextlib.asynccontextmanager
async def _serving(broker: BrokerSettings) -> AsyncIterator[int]:
    port = reserve_port()
    argv = [sys.executable, "-m", "toolcrew.orchestrator", "serve", "mcp", "--http", str(port)]
    environment = {
        "TOOLCREW_REDIS_URL": broker.redis_url.get_secret_value(),
        "TOOLCREW_API_RATE": "1000000",
    }
    with tempfile.TemporaryDirectory() as folder, child_process(argv, environment, Path(folder) / "log"):
        await _until_ready(port)
        yield port


async def _until_ready(port: int) -> None:
    async with asyncio.timeout(60), httpx2.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
