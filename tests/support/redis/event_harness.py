"""Both ends of call events over a real Redis: one listener, and the writers of the calls. Each writer runs in a
thread, as in a worker.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import redis

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.call_events import OUTPUT
from toolcrew.orchestrator.dispatch.call_event_listener import (
    CallEventListener,
    CallEventReader,
    OnOutput,
    output_handler,
)
from toolcrew.store.call_event_streams import WorkerCallEventStore
from toolcrew.store.connection import connect_once, open_redis
from toolcrew.workers.call_event_writer import CallEventWriter

DEPLOYMENT = "test"


class EventHarness:
    """A listener, and the writers of the calls of its tenants."""

    def __init__(self, server: RedisProcess) -> None:
        self.broker = BrokerSettings.model_validate({"redis_url": server.url, "deployment": DEPLOYMENT})
        self.redis = open_redis(self.broker)
        self.events = CallEventListener(self.redis, DEPLOYMENT, KEY)
        self.plain = server.client()
        self._clients: list[redis.Redis] = []

    def writer(self, call_id: str = "call-1", tenant: str = "acme") -> CallEventWriter:
        client = connect_once(self.broker)
        self._clients.append(client)
        return CallEventWriter(WorkerCallEventStore(client, DEPLOYMENT, KEY, tenant, call_id, self.events.id), call_id)

    async def hear(
        self, work: Callable[[CallEventWriter], Any], on_output: OnOutput, call_id: str = "call-1"
    ) -> CallEventReader:
        """Listen to a call while `work` acts as the worker in a thread. Ends as a call does, after all events are
        delivered.
        """
        async with self.events.listen("acme", call_id, {OUTPUT: output_handler(on_output)}, 30) as reader:
            await asyncio.to_thread(run_call, work, self.writer(call_id))
        assert reader is not None
        return reader

    def names(self) -> list[bytes]:
        return self.plain.keys(f"toolcrew:{DEPLOYMENT}:*")  # type: ignore[return-value]

    async def close(self) -> None:
        await self.events.close()
        await self.redis.aclose()
        for client in (*self._clients, self.plain):
            client.close()


def run_call(work: Callable[[CallEventWriter], Any], writer: CallEventWriter) -> int:
    try:
        work(writer)
    finally:
        hidden = writer.close()
    return hidden


class Screen:
    """The output that a caller received."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []

    def show(self, stream: str, text: str) -> None:
        self.pieces.append((stream, text))

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for name, text in self.pieces if name == stream)
