"""Both ends of calls' events over a real Redis: one listener, and the writers of its calls, each in a thread as in a worker."""

import asyncio
from collections.abc import Callable
from typing import Any

import redis

from contract.call_events import OUTPUT
from contract.settings import BrokerSettings
from store.call_event_writer import EventWriter
from store.call_listener import CallEvents
from store.connection import connect_once, open_redis
from store.heard_calls import HeardCall, OnOutput, output_handler
from tests.builders import build_call, build_context
from tests.conftest import RedisProcess

DEPLOYMENT = "test"


class House:
    """A listener, and the writers of calls of its tenants."""

    def __init__(self, server: RedisProcess) -> None:
        self.broker = BrokerSettings.model_validate({"redis_url": server.url, "deployment": DEPLOYMENT})
        self.redis = open_redis(self.broker)
        self.events = CallEvents(self.redis, DEPLOYMENT)
        self.plain = server.client()
        self._clients: list[redis.Redis] = []

    def writer(self, call_id: str = "call-1", tenant: str = "acme") -> EventWriter:
        client = connect_once(self.broker)
        self._clients.append(client)
        return EventWriter(client, DEPLOYMENT, build_call(call_id=call_id), build_context(tenant=tenant, events=self.events.listener))

    async def hear(self, work: Callable[[EventWriter], Any], on_output: OnOutput, call_id: str = "call-1") -> HeardCall:
        """Listen to a call whose worker is `work` in a thread; ends as a call does, with everything delivered."""
        async with self.events.listen("acme", call_id, {OUTPUT: output_handler(on_output)}, 30) as heard:
            await asyncio.to_thread(run_call, work, self.writer(call_id))
        assert heard is not None
        return heard

    def names(self) -> list[bytes]:
        return self.plain.keys(f"toolcrew:{DEPLOYMENT}:*")  # type: ignore[return-value]

    async def close(self) -> None:
        await self.events.close()
        await self.redis.aclose()
        for client in (*self._clients, self.plain):
            client.close()


def run_call(work: Callable[[EventWriter], Any], writer: EventWriter) -> int:
    try:
        work(writer)
    finally:
        hidden = writer.close()
    return hidden


class Screen:
    """What a caller was shown."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []

    def show(self, stream: str, text: str) -> None:
        self.pieces.append((stream, text))

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for name, text in self.pieces if name == stream)
