"""Slots of requests with an Idempotency-Key. A request whose Redis reply was lost asks again and takes no slot of
another request.
"""

import json
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from toolcrew.contract.broker import BrokerSettings
from toolcrew.store.connection import open_redis
from toolcrew.store.idempotency import KEEP_S, PENDING_S, SLOT_BYTES, IdempotencyStore

RECORD = json.dumps({"digest": "d", "status": 201, "headers": [], "body": ""})
SIZE = len(KEY.seal("answer d", RECORD)) + SLOT_BYTES


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    async with open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url})) as client:
        yield client


@pytest.fixture
def slots(client: "redis.asyncio.Redis") -> IdempotencyStore:
    return IdempotencyStore(client, "d", KEY)


async def test_repeated_claim_and_response_count_once(slots: IdempotencyStore, client: "redis.asyncio.Redis") -> None:
    slot_name = slots.name("key", "word", "d", "1", "acme")
    assert [await slots.claim(slot_name) for _ in range(3)] == [None, None, None]
    for _ in range(3):
        await slots.keep(slot_name, RECORD)
    assert await slots.claim(slots.name("key", "word", "d", "2", "acme")) == json.loads(RECORD)
    assert await slots.count("key") == SIZE
    assert PENDING_S < await client.ttl(slot_name.slot) <= KEEP_S


async def test_stored_response_counts_until_it_expires(client: "redis.asyncio.Redis") -> None:
    now = 3599.0
    slots = IdempotencyStore(client, "d", KEY, clock=lambda: now)
    await slots.keep(slots.name("key", "word", "d", "1", "acme"), RECORD)
    now += KEEP_S - 1
    assert await slots.count("key") == SIZE


async def test_claim_after_its_release_takes_no_slot(slots: IdempotencyStore) -> None:
    first, second = (slots.name("key", "word", "d", token, "acme") for token in "12")
    await slots.release(first)
    await slots.claim(first)
    assert await slots.claim(second) is None


async def test_late_release_keeps_the_slot_of_another_request(slots: IdempotencyStore) -> None:
    first, second, third = (slots.name("key", "word", "d", token, "acme") for token in "123")
    await slots.claim(first)
    await slots.release(first)
    assert await slots.claim(second) is None
    await slots.release(first)
    assert (await slots.claim(third) or {})["pending"] is True
    await slots.keep(first, RECORD)
    assert (await slots.claim(third) or {})["pending"] is True
    await slots.keep(second, RECORD)
    await slots.release(second)
    await slots.release(first)
    assert await slots.claim(third) == json.loads(RECORD)
