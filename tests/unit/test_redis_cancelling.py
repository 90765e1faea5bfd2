"""A task that is cancelled while it talks to Redis ends, at whichever moment the cancellation comes."""

import asyncio

import pytest
import redis.asyncio
from pydantic import SecretStr

from contract.settings import BrokerSettings
from store.connection import open_redis
from tests.conftest import RedisProcess


async def test_a_cancellation_that_comes_while_a_command_is_sent_is_not_lost(redis_server: RedisProcess) -> None:
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
