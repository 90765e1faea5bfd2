"""Streams of a session's sandbox, as the routes of processes, files and ports use them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.stream_protocol import WINDOW_BYTES
from toolcrew.orchestrator.api.access import Caller
from toolcrew.orchestrator.http.piece_responses import ResponseCut
from toolcrew.orchestrator.streams import Stream, StreamPiece, StreamTarget
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

STALL_S = 60.0
"""Seconds without a byte after which the transfer of a file is given up."""


@dataclass(frozen=True)
class SessionStreams:
    """The streams of one session for one caller."""

    caller: Caller
    target: StreamTarget

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Make a request of docs/stream-protocol.md. Raises ToolFailure, OperatorError."""
        return await self.caller.app_state.parts.streams.call(self.target, {"op": op, **fields})

    @asynccontextmanager
    async def open(self, opening: Mapping[str, Any], window: int = WINDOW_BYTES) -> AsyncIterator[Stream]:
        """Open a stream of docs/stream-protocol.md, and leave it at the end. `opening`: the payload of OPEN.

        Raises ToolFailure, OperatorError, and ApiProblem when the caller has too many open streams.
        """
        streams = self.caller.app_state.parts.streams
        with self.caller.app_state.sandbox_streams.count(self.caller.tenant, self.caller.identity.key_id):
            async with await streams.open(self.target, opening, window=window) as stream:
                yield stream


async def use_streams(caller: Caller, session_id: str) -> SessionStreams:
    """Return the streams of an open session. An operator's use of another tenant's session is audited.

    Raises ToolFailure(SESSION_NOT_FOUND), also for a session of another tenant, and BrokerUnavailable.
    """
    await caller.app_state.parts.pool.dispatcher.locator.location(caller.tenant, session_id)
    await caller.record_foreign_action("session.use", session_id)
    return SessionStreams(caller, StreamTarget(caller.tenant, session_id, caller.identity.actor()))


async def read_piece(stream: Stream) -> StreamPiece | None:
    """Return the next bytes of a transfer, or None at its end. Raises ToolFailure, OperatorError."""
    try:
        async with asyncio.timeout(STALL_S):
            return await stream.read()
    except TimeoutError:
        raise _stalled() from None


async def write_piece(stream: Stream, data: bytes, *, is_last: bool = False) -> None:
    """Send bytes of a transfer. Raises ToolFailure, OperatorError."""
    try:
        async with asyncio.timeout(STALL_S):
            await stream.write(data, is_last=is_last)
    except TimeoutError:
        raise _stalled() from None


async def cut_at_failure(pieces: AsyncIterator[bytes], session_id: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a response whose head was sent. A failure raises ResponseCut."""
    try:
        async for piece in pieces:
            yield piece
    except (ToolFailure, OperatorError) as error:
        log.warning("response_cut", session=session_id, code=error.code.value, error=str(error))
        raise ResponseCut from error


def _stalled() -> ToolFailure:
    return ToolFailure(
        ErrorCode.TIMEOUT, f"the sandbox has taken or sent no byte for {STALL_S:g} s: send the request again"
    )
