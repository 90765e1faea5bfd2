"""Streams to the sandboxes of a real stack."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.stack.stack import Stack
from toolcrew import ToolClient
from toolcrew.contract.errors import StreamLost
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.orchestrator.streams import Stream, Streams, StreamTarget
from toolcrew.store.audit import Actor

ACTOR = Actor(key="a-key", role="tenant", name="Ada", tenant="default")


@dataclass
class StreamSession:
    """An open session, and its streams."""

    client: ToolClient
    session: Session
    streams: Streams

    @property
    def target(self) -> StreamTarget:
        return StreamTarget(self.session.tenant, self.session.id, ACTOR)

    async def open(self, opening: Mapping[str, Any], **options: Any) -> Stream:
        """Open a stream."""
        return await self.streams.open(self.target, opening, **options)

    async def start(self, *argv: str, **fields: Any) -> Stream:
        """Start a process."""
        return await self.open({"what": "process", "argv": list(argv), **fields})

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Make a request."""
        return await self.streams.call(self.target, {"op": op, **fields})

    async def read_to_end(self, stream: Stream) -> bytes:
        """Return all output of a process, attaching again whenever the connection is lost."""
        process, data = stream.opened["process"], b""
        async with asyncio.timeout(120):
            while True:
                try:
                    piece = await stream.read()
                except StreamLost:
                    opening = {"what": "attach", "process": process, "from": len(data), "pace": True}
                    stream = await self.open(opening)
                    assert stream.opened["from"] == len(data)
                    continue
                if piece is None:
                    return data
                assert stream.opened["from"] + piece.offset == len(data)
                data += piece.data


@contextlib.asynccontextmanager
async def open_stream_session(stack: Stack, tenant: str = "default") -> AsyncIterator[StreamSession]:
    """Open a session of a stack for streams."""
    async with ToolClient.connect(stack.redis_url, tenant=tenant) as client, await client.open_session() as session:
        streams = Streams(client._pool, stack.info.deployment)
        try:
            yield StreamSession(client, session, streams)
        finally:
            await streams.close()
