"""A hub on a real Redis, results as workers store them, and a network between hub and Redis that can go silent."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.fakes import close_hub
from tests.support.stack.waiting import SOON_S
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.call_messages import ResultHub


@asynccontextmanager
async def open_hub(server: RedisProcess) -> AsyncIterator[tuple[ResultHub, "redis.asyncio.Redis"]]:
    client = redis.asyncio.Redis.from_url(server.url, socket_timeout=5)
    hub = ResultHub(client)
    await hub.start()
    try:
        yield hub, client
    finally:
        await close_hub(hub)
        await client.aclose()


def build_stored_result(task_id: str, status: str = "SUCCESS", **fields: Any) -> str:
    return json.dumps({"task_id": task_id, "status": status, "result": {"n": 1}, **fields})


async def publish(client: "redis.asyncio.Redis", task_id: str, data: str | bytes | None = None) -> None:
    await client.publish(f"celery-task-meta-{task_id}", build_stored_result(task_id) if data is None else data)


async def receive(future: "asyncio.Future[dict[str, Any]]") -> dict[str, Any]:
    return await asyncio.wait_for(asyncio.shield(future), SOON_S)


class SilentRelay:
    """A relay between a client and Redis. While `swallow` is set, the relay drops data in both directions without
    closing, as a network does when the other end is lost.
    """

    def __init__(self, server: RedisProcess) -> None:
        self._server = server
        self._port = reserve_port()
        self.url = f"redis://:{server.password}@127.0.0.1:{self._port}/0"
        self.swallow = False
        self.connections = 0

    async def __aenter__(self) -> "SilentRelay":
        self._relay = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._relay.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._server.port)
            await asyncio.gather(self._pump(reader, ours), self._pump(theirs, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.swallow:
                writer.write(data)
        writer.close()
