"""A connection that was lost while idle does not fail any command, neither after a restart of Redis nor after a reset
of the network. A task that is cancelled while it talks to Redis ends, at whichever moment the cancellation comes.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from pydantic import SecretStr
from redis.exceptions import BusyLoadingError

from tests.conftest import RedisProcess
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.store import connection as redis_connection
from toolcrew.store.connection import check_redis, connect_once, open_redis

CONNECTIONS = 4


def settings(url: str) -> BrokerSettings:
    return BrokerSettings(redis_url=SecretStr(url))


def restart(server: RedisProcess) -> None:
    server.stop()
    server.start()


async def test_orchestrator_reconnects_after_a_restart(redis_server: RedisProcess) -> None:
    async with open_redis(settings(redis_server.url)) as client:
        await asyncio.gather(*(client.ping() for _ in range(CONNECTIONS)))
        await asyncio.to_thread(restart, redis_server)
        assert await asyncio.gather(*(client.ping() for _ in range(CONNECTIONS))) == [True] * CONNECTIONS


def test_worker_reconnects_after_a_restart(redis_server: RedisProcess) -> None:
    with connect_once(settings(redis_server.url)) as client:
        client.ping()
        restart(redis_server)
        assert client.ping()


async def test_orchestrator_reconnects_after_a_reset(redis_server: RedisProcess) -> None:
    async with open_relay(redis_server) as relay, open_redis(settings(relay.url)) as client:
        await client.ping()
        connection = client.connection_pool._available_connections[0]
        relay.reset_all()
        with pytest.raises(ConnectionResetError):
            await connection._reader.read(1)  # until the loop has seen it
        assert await client.ping()


class Relay:
    """A relay between a client and Redis that can reset the connections."""

    def __init__(self, server: RedisProcess) -> None:
        self._server = server
        self._writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writers.append(writer)
        await asyncio.gather(_pass_on(reader, below), _pass_on(above, writer))

    def reset_all(self) -> None:
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def open_relay(server: RedisProcess) -> AsyncIterator[Relay]:
    relay = Relay(server)
    listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    async with listener:
        relay.url = f"redis://:{server.password}@127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
        yield relay


class LoadingRedis:
    """Stands for a Redis that is loading its data for the given number of checks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    async def ping(self) -> bool:
        self.looks -= 1
        if self.looks >= 0:
            raise BusyLoadingError("Redis is loading the dataset in memory")
        return True


async def test_startup_waits_while_redis_loads_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "CHECK_INTERVAL_S", 0.0)
    client: Any = LoadingRedis(3)
    await check_redis(client, settings("redis://127.0.0.1:1/0"))
    assert client.looks == -1
    monkeypatch.setattr(redis_connection, "LOADING_S", 0.0)
    always_loading: Any = LoadingRedis(1000)
    with pytest.raises(BrokerUnavailable, match="loading the dataset"):
        await check_redis(always_loading, settings("redis://127.0.0.1:1/0"))


async def test_cancellation_during_a_command_is_not_lost(redis_server: RedisProcess) -> None:
    client = open_redis(BrokerSettings(redis_url=SecretStr(redis_server.url)))
    try:
        await client.ping()
        # After so many turns of the loop; some of them lie between the last byte sent and the client hearing of it.
        for turns in range(1, 12):
            task = asyncio.create_task(_talk(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await client.ping()
    finally:
        await client.aclose()


async def _talk(client: "redis.asyncio.Redis") -> None:
    """Send fifty commands. A cancelled task sends no further command."""
    for _ in range(50):
        await client.ping()
