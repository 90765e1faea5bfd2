"""`toolcrew serve mcp` over stdin and stdout: one client, one connection, one session."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

from mcp.server.stdio import stdio_server

from orchestrator.client import ToolClient
from orchestrator.logs import get_logger
from orchestrator.mcp.calls import Caller
from orchestrator.mcp.leases import ConnectionLeases
from orchestrator.mcp.server import build_server
from orchestrator.settings import OrchestratorSettings

log = get_logger(__name__)

MAX_LINE_BYTES = 4 * 1024 * 1024
WAITING_LINES = 64
_CHUNK_BYTES = 64 * 1024


async def serve_stdio(client: ToolClient, settings: OrchestratorSettings, session: str | None) -> None:
    """Until the client closes our stdin. `session`: one that is open, for all calls that name none."""
    if session is not None:
        # Now, and not with the first call: whoever has misspelled it reads it here.
        await client.session(session)
    leases = ConnectionLeases(client, session)
    caller = Caller(client, leases, client.tenant, asks_client=settings.approvals == "ask")
    server = build_server(lambda _: caller, keys=None, approval_wait_s=settings.approval_wait_s, audience="stdio")
    stdin = cast(Any, _Lines(os.dup(0)))
    try:
        async with stdio_server(stdin) as (read, write):
            log.info("mcp_serving", transport="stdio", tenant=client.tenant)
            await server.run(read, write, server.create_initialization_options())
    finally:
        await asyncio.shield(leases.close())
    log.info("stopped")


class _Lines:
    """Lines of a file descriptor, read by a thread that keeps nobody from ending: the SDK's own waits for the next line even when told to stop.

    A line that is too long comes as an empty one, which is no message.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._lines = asyncio.Queue[str | None](WAITING_LINES)
        threading.Thread(target=self._read, name="mcp-stdin", daemon=True).start()

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            yield line

    def _read(self) -> None:
        held, is_skipping = bytearray(), False
        while chunk := os.read(self._fd, _CHUNK_BYTES):
            *ended, rest = chunk.split(b"\n")
            for part in ended:
                held += part
                self._put("" if is_skipping or len(held) > MAX_LINE_BYTES else held.decode("utf-8", "replace"))
                held, is_skipping = bytearray(), False
            held += rest
            if len(held) > MAX_LINE_BYTES:
                log.warning("mcp_line_too_long", most_bytes=MAX_LINE_BYTES)
                held, is_skipping = bytearray(), True
        self._put(None)

    def _put(self, line: str | None) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()
        except RuntimeError:
            # The loop is closed: nobody reads any more.
            raise SystemExit from None
