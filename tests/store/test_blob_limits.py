"""The bytes of calls and results that Redis holds for a tenant have a limit."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import BlobPool
from toolcrew.store import blobs as blob_store
from toolcrew.store.blobs import LEAST_CHARGE, Blobs, WorkerBlobs

TENANT_LIMIT = 4 * LEAST_CHARGE


class Harness:
    """Both sides' blobs in one Redis."""

    def __init__(self, server: RedisProcess, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.sync = server.client()
        self.own = Blobs(client, "d")
        self.workers = WorkerBlobs(self.sync, "d", "sandbox")
        self.web = WorkerBlobs(self.sync, "d", "web")

    def keys(self, tenant: str = "acme") -> list[bytes]:
        return list(self.sync.scan_iter(f"toolcrew:d:t:{tenant}:blob-*.*-*"))


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(blob_store, "TENANT_BLOB_BYTES", TENANT_LIMIT)
    monkeypatch.setattr(blob_store, "ROOM_WAIT_S", 0)
    monkeypatch.setattr(blob_store, "RESULT_ROOM_WAIT_S", 0)
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        harness = Harness(redis_server, client)
        yield harness
        harness.sync.close()


@contextmanager
def quota_exceeded() -> Iterator[None]:
    with pytest.raises(ToolFailure) as refused:
        yield
    assert refused.value.code is ErrorCode.QUOTA_EXCEEDED


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_blob_above_the_limit_stores_nothing(
    harness: Harness, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store, "CHECK_FIRST_BYTES", 0 if is_large else 2 * TENANT_LIMIT)
    with quota_exceeded():
        await harness.own.leave("acme", bytes(TENANT_LIMIT + 1))
    with quota_exceeded():
        harness.workers.leave("acme", bytes(TENANT_LIMIT + 1))
    assert harness.keys() == []
    assert await harness.own.leave("acme", bytes(TENANT_LIMIT))


async def test_reading_dropping_or_expiry_of_a_blob_frees_its_space(harness: Harness) -> None:
    for _ in range(3):
        assert await harness.own.take("acme", harness.workers.leave("acme", bytes(TENANT_LIMIT))) == bytes(TENANT_LIMIT)
        await harness.own.drop(await harness.own.leave("acme", bytes(TENANT_LIMIT)))
        # An instant in the past: it has expired.
        harness.sync.pexpireat(harness.workers.leave("acme", bytes(TENANT_LIMIT)), 1)
    assert harness.keys() == []
    assert harness.sync.hlen("toolcrew:d:t:acme:blob-sandbox.sizes") == 2


async def test_small_blobs_are_charged_a_minimum_size(harness: Harness) -> None:
    for _ in range(TENANT_LIMIT // LEAST_CHARGE):
        harness.workers.leave("acme", b"x")
    with quota_exceeded():
        harness.workers.leave("acme", b"x")


async def test_a_blob_waits_until_another_blob_is_dropped(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "ROOM_WAIT_S", 30)
    refused, store = asyncio.Event(), harness.own._store

    async def store_and_note(tenant: str, pool: BlobPool, key: str, data: bytes) -> bool:
        if not (is_stored := await store(tenant, pool, key, data)):
            refused.set()
        return is_stored

    monkeypatch.setattr(harness.own, "_store", store_and_note)
    first = await harness.own.leave("acme", bytes(TENANT_LIMIT))
    second = asyncio.create_task(harness.own.leave("acme", b"second"))
    await asyncio.wait_for(refused.wait(), SOON_S)
    assert not second.done()
    await harness.own.drop(first)
    assert await harness.own.take("acme", await asyncio.wait_for(second, SOON_S)) == b"second"


async def test_the_output_of_a_call_with_a_chosen_id_is_kept_for_its_other_callers(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store, "TENANT_BLOB_BYTES", 4 * blob_store.KEPT_BYTES)
    small, large = harness.workers.leave("acme", b"x"), harness.workers.leave("acme", bytes(blob_store.KEPT_BYTES + 1))
    for _ in range(2):
        assert await harness.own.take("acme", small, keeps=True) == b"x"
        async with harness.own.hold("acme", large, keeps=True) as (pieces, _):
            assert sum(map(len, pieces)) == blob_store.KEPT_BYTES + 1
    lives = [harness.sync.ttl(key) for key in (small, large)]
    assert lives[1] <= blob_store.LARGE_KEPT_S < lives[0] <= blob_store.BLOB_TTL_S
