"""A batch that is being cancelled ends, wherever its items are: waiting, waiting for a retry, or held by a dead
process.
"""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from contract.run_events import FailureKind
from orchestrator.runs.follower import Follower
from store.batches import BatchState
from store.run_events import BatchEventReader
from store.runs import BatchCancelled
from tests.conftest import RedisProcess
from tests.run_harness import RunHarness, build_outcome

BATCH = ("acme", "b")


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[RunHarness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield RunHarness(client)


async def test_waiting_retries_end_with_their_batch(harness: RunHarness) -> None:
    await harness.submit(2)
    await harness.submit(1, batch="c")
    (claim, _) = await harness.queue.claim(2, BATCH)
    (other,) = await harness.queue.claim(1, ("acme", "c"))
    for item in (claim, other):
        assert await harness.queue.give_back(item, after_s=1000.0, is_new=True)
    assert await harness.queue.cancel(*BATCH) == 1
    record = await harness.queue.batch(*BATCH)
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLING, 1)
    assert await harness.client.zrange("toolcrew:d:runs:delayed", 0, -1) == [b"acme|c-1"]


async def test_runs_of_a_dead_process_end_with_their_batch(harness: RunHarness) -> None:
    await harness.submit(2)
    dead, alive = await harness.queue.claim(2)
    await harness.die(dead)
    await harness.queue.cancel(*BATCH)
    record = await harness.queue.batch(*BATCH)
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLING, 1)
    assert not await harness.queue.finish(dead, build_outcome(dead))
    assert await harness.queue.finish(alive, build_outcome(alive))
    assert (await harness.queue.batch(*BATCH)).state is BatchState.CANCELLED


@pytest.mark.parametrize("anew", [True, False])
async def test_a_run_of_a_cancelled_batch_is_not_given_back(harness: RunHarness, anew: bool) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.queue.cancel(*BATCH)
    with pytest.raises(BatchCancelled):
        await harness.queue.give_back(claim, is_new=anew)
    assert await harness.queue.finish(claim, build_outcome(claim, FailureKind.CANCELLED))
    assert (await harness.queue.batch(*BATCH)).state is BatchState.CANCELLED


async def test_a_watcher_sees_the_end_of_a_cancelled_batch(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.queue.cancel(*BATCH)
    await harness.die(claim)
    reader = BatchEventReader(harness.client, "d", *BATCH)
    follower = Follower(harness.queue, reader, *BATCH, rows=None, show=lambda _: None, tick=lambda: None)
    assert (await follower.run()).state is BatchState.CANCELLED
