"""Fixtures that several folders of tests import in their conftest.py."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.conftest import RedisProcess


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    """Return a connection to the emptied server. A file may override this fixture."""
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as opened:
        yield opened
