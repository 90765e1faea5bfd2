"""Previews of sessions in Redis."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from toolcrew.contract.errors import RecordRefused
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.audit import Actor
from toolcrew.store.connection import RedisClient
from toolcrew.store.previews import Preview, PreviewStore

KEYS = SigningKeys.of("s" * 40)
ACTOR = Actor(key="k1", role="tenant", tenant="acme")
ONE = Preview(tenant="acme", session="one", access="token", actor=ACTOR)


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator[RedisClient]:
    async with redis.asyncio.Redis.from_url(redis_server.url) as opened:
        yield opened


@pytest.fixture
def store(client: RedisClient) -> PreviewStore:
    return PreviewStore(client, "test", KEYS)


async def test_a_session_has_one_preview_which_ends_at_its_latest_time(
    client: RedisClient, store: PreviewStore
) -> None:
    name = await store.keep(ONE, 1000)
    public = ONE.model_copy(update={"access": "public"})
    assert await store.keep(public, 10) == name
    assert await store.find(name) == public
    assert {await client.ttl(key) > 900 for key in await client.keys("*preview*")} == {True}
    assert await store.keep(ONE.model_copy(update={"session": "two"}), 10) != name
    assert await store.keep(ONE.model_copy(update={"tenant": "other"}), 10) != name


async def test_an_unknown_preview_is_none_and_a_copied_one_is_refused(client: RedisClient, store: PreviewStore) -> None:
    name = await store.keep(ONE, 10)
    assert await store.find("a" * 20) is None
    await client.copy(f"toolcrew:test:preview.{name}", f"toolcrew:test:preview.{'b' * 20}")
    with pytest.raises(RecordRefused):
        await store.find("b" * 20)
