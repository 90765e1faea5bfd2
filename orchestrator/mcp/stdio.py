"""Service of `toolcrew serve mcp` over stdin and stdout: one client, one connection, one session."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import anyio
from anyio.abc import ObjectSendStream
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import WriteStream
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.mcp.calls import McpCaller
from toolcrew.orchestrator.mcp.leases import ConnectionLeases
from toolcrew.orchestrator.mcp.server import build_server
from toolcrew.orchestrator.sdk.tenant_client import TenantClient
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_LINE_BYTES = 4 * 1024 * 1024
WAITING_LINES = 64
_CHUNK_BYTES = 64 * 1024
_UNREADABLE = (
    f"the line is not a JSON-RPC message: send one message per line, at most {MAX_LINE_BYTES} bytes, in UTF-8, "
    "without lone surrogates or deep nesting"
)


async def serve_stdio(client: TenantClient, settings: OrchestratorSettings, session: str | None) -> None:
    """Serve until the client closes stdin. `session`: an open session for all calls that name none."""
    if session is not None:
        # Checked now, so that a wrong id is reported at the start and not with the first call.
        await client.session(session)
    leases = ConnectionLeases(client, session)
    caller = McpCaller(client, leases, client.tenant, asks_client=settings.approvals == "ask")
    server = build_server(lambda _: caller, keys=None, approval_wait_s=settings.approval_wait_s, audience="stdio")
    lines = _Lines(os.dup(0))
    # Unlike the SDK's reader of stdin, this one answers every message, and it does not wait for a line when it stops.
    arriving, arrived = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    try:
        async with stdio_server(cast(Any, _no_lines())) as (_, write), asyncio.TaskGroup() as reading:
            log.info("mcp_serving", transport="stdio", tenant=client.tenant)
            relaying = reading.create_task(_relay(lines, arriving, write))
            await server.run(arrived, write, server.create_initialization_options())
            relaying.cancel()
    finally:
        await asyncio.shield(leases.close())
    log.info("stopped")


async def _relay(
    lines: "_Lines", arriving: ObjectSendStream[SessionMessage | Exception], write: WriteStream[SessionMessage]
) -> None:
    """Pass messages to the server, and report invalid lines to the client."""
    async with arriving:
        async for line in lines:
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                await write.send(SessionMessage(_refusal(line)))
            else:
                await arriving.send(SessionMessage(message))


def _refusal(line: str) -> JSONRPCError:
    message: Any = None
    with suppress(ValueError, RecursionError):
        message = json.loads(line)
    number = message.get("id") if isinstance(message, dict) else None
    return JSONRPCError(
        jsonrpc="2.0",
        id=number if isinstance(number, str | int) else None,
        error=ErrorData(code=PARSE_ERROR, message=_UNREADABLE),
    )


async def _no_lines() -> AsyncIterator[str]:
    return
    yield


class _Lines:
    """Reads non-blank lines of a file descriptor in a daemon thread, which cannot block the end of the process. A
    line that is too long is cut and then is no valid JSON.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._lines = asyncio.Queue[str | None](WAITING_LINES)
        threading.Thread(target=self._read, name="mcp-stdin", daemon=True).start()

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            if line.strip():
                yield line

    def _read(self) -> None:
        pending = bytearray()
        while chunk := os.read(self._fd, _CHUNK_BYTES):
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                self._put((pending + line)[: MAX_LINE_BYTES + 1].decode("utf-8", "replace"))
                pending = bytearray()
            pending += rest[: MAX_LINE_BYTES + 1 - len(pending)]
        self._put(None)

    def _put(self, line: str | None) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()
        except RuntimeError:
            # The loop is closed, and no task reads any more lines.
            raise SystemExit from None
