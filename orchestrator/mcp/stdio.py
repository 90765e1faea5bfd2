"""`toolcrew serve mcp` over stdin and stdout: one client, one connection, one session."""

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

from orchestrator.mcp.calls import Caller
from orchestrator.mcp.leases import ConnectionLeases
from orchestrator.mcp.server import build_server
from orchestrator.sdk.client import ToolClient
from orchestrator.settings import OrchestratorSettings
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_LINE_BYTES = 4 * 1024 * 1024
WAITING_LINES = 64
_CHUNK_BYTES = 64 * 1024
_UNREADABLE = (
    f"this is no JSON-RPC message: send one a line, of at most {MAX_LINE_BYTES} bytes, in UTF-8, without halves of "
    "surrogate pairs, and not nested deeply"
)


async def serve_stdio(client: ToolClient, settings: OrchestratorSettings, session: str | None) -> None:
    """Until the client closes our stdin. `session`: one that is open, for all calls that name none."""
    if session is not None:
        # Now, and not with the first call: whoever has misspelled it reads it here.
        await client.session(session)
    leases = ConnectionLeases(client, session)
    caller = Caller(client, leases, client.tenant, asks_client=settings.approvals == "ask")
    server = build_server(lambda _: caller, keys=None, approval_wait_s=settings.approval_wait_s, audience="stdio")
    lines = _Lines(os.dup(0))
    # Unlike the SDK's own stdin this one leaves no message without an answer, and waits for no line when it is told to
    # stop.
    arriving, arrived = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    try:
        async with stdio_server(cast(Any, _nothing())) as (_, write), asyncio.TaskGroup() as reading:
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
    """Messages to the server; to the client, which of its lines were none."""
    async with arriving:
        async for line in lines:
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                await write.send(SessionMessage(_refusal(line)))
            else:
                await arriving.send(SessionMessage(message))


def _refusal(line: str) -> JSONRPCError:
    told: Any = None
    with suppress(ValueError, RecursionError):
        told = json.loads(line)
    number = told.get("id") if isinstance(told, dict) else None
    return JSONRPCError(
        jsonrpc="2.0",
        id=number if isinstance(number, str | int) else None,
        error=ErrorData(code=PARSE_ERROR, message=_UNREADABLE),
    )


async def _nothing() -> AsyncIterator[str]:
    return
    yield


class _Lines:
    """Lines of a file descriptor that are not blank, read by a thread that keeps nobody from ending. One that is too
    long comes cut, and is no JSON then.
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
        held = bytearray()
        while chunk := os.read(self._fd, _CHUNK_BYTES):
            *ended, rest = chunk.split(b"\n")
            for part in ended:
                self._put((held + part)[: MAX_LINE_BYTES + 1].decode("utf-8", "replace"))
                held = bytearray()
            held += rest[: MAX_LINE_BYTES + 1 - len(held)]
        self._put(None)

    def _put(self, line: str | None) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()
        except RuntimeError:
            # The loop is closed: nobody reads any more.
            raise SystemExit from None
