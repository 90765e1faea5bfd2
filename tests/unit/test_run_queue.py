"""The queue of runs on a real Redis: one process at a time holds a run, and every run ends once."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from contract.run_events import FailureKind
from store.batches import BatchState
from store.run_records import RunState
from store.runs import AT_ONCE
from tests.conftest import RedisProcess
from tests.run_harness import RunHarness, build_item, build_outcome


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[RunHarness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield RunHarness(client)


async def test_runs_are_claimed_once_in_the_order_of_their_lines(harness: RunHarness) -> None:
    await harness.submit(5)
    first, second = await harness.queue.claim(3), await harness.other.claim(9)
    assert [claim.run for claim in first] == ["b-1", "b-2", "b-3"]
    assert [claim.run for claim in second] == ["b-4", "b-5"]
    assert {claim.record.state for claim in first + second} == {RunState.RUNNING}
    assert first[0].record.item == build_item(1)
    assert await harness.queue.claim(9) == []


async def test_batches_take_turns_and_none_has_more_at_a_time_than_it_may(harness: RunHarness) -> None:
    await harness.submit(9, batch="b", concurrency=3)
    await harness.submit(9, batch="c", tenant="other")
    claimed = [claim.run for claim in await harness.queue.claim(8)]
    assert sorted(claimed[:6]) == ["b-1", "b-2", "b-3", "c-1", "c-2", "c-3"]
    assert claimed[6:] == ["c-4", "c-5"]


async def test_many_batches_get_a_tenant_no_more_runs_than_another_tenant_with_one(harness: RunHarness) -> None:
    for number in range(50):
        await harness.submit(2, batch=f"b{number}")
    await harness.queue.claim(20)
    await harness.submit(9, batch="c", tenant="other")
    claimed = [claim.tenant for _ in range(3) for claim in await harness.queue.claim(4)]
    assert claimed.count("other") == 6
    await harness.submit(1, batch="d", tenant="other")
    # Each of the other tenant's batches gets its turn, too.
    assert "d-1" in [claim.run for claim in await harness.queue.claim(6)]


async def test_a_claim_for_one_batch_gets_no_other_run(harness: RunHarness) -> None:
    await harness.submit(3, batch="b")
    await harness.submit(2, batch="c", tenant="other")
    (dead,) = await harness.queue.claim(1, ("acme", "b"))
    await harness.die(dead)
    assert [claim.run for claim in await harness.other.claim(9, ("other", "c"))] == ["c-1", "c-2"]
    assert await harness.other.claim(9, ("other", "d")) == []
    assert [claim.run for claim in await harness.queue.claim(9, ("acme", "b"))] == ["b-1", "b-2", "b-3"]


async def test_the_run_of_a_process_that_died_goes_to_another_which_goes_on_with_it(harness: RunHarness) -> None:
    await harness.submit(1)
    (dead,) = await harness.queue.claim(1)
    await harness.die(dead)
    (claim,) = await harness.other.claim(1)
    assert (claim.run, claim.is_resumed, claim.token != dead.token) == ("b-1", True, True)
    assert claim.record.started_at == dead.record.started_at
    assert await harness.queue.renew([dead]) == ({("acme", "b-1")}, set())
    assert not await harness.queue.finish(dead, build_outcome(dead))
    assert not await harness.queue.give_back(dead)
    assert await harness.other.finish(claim, build_outcome(claim))


async def test_a_run_that_is_renewed_stays_whose_it_is(harness: RunHarness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.die(claim)
    assert await harness.queue.renew([claim]) == (set(), set())
    assert await harness.other.claim(1) == []


async def test_a_batch_is_complete_when_every_run_has_ended(harness: RunHarness) -> None:
    await harness.submit(3)
    kinds = (None, FailureKind.MODEL, FailureKind.INFRASTRUCTURE)
    for claim, kind in zip(await harness.queue.claim(3), kinds, strict=True):
        await harness.queue.finish(claim, build_outcome(claim, kind))
    record = await harness.queue.batch("acme", "b")
    assert (record.state, record.succeeded, record.failed[FailureKind.MODEL]) == (BatchState.COMPLETED, 1, 1)
    (status,) = await harness.queue.runs([("acme", "b-3")])
    assert status is not None
    assert status.state == RunState.ENDED
    assert (
        status.outcome.failure.kind if status.outcome and status.outcome.failure else None
    ) == FailureKind.INFRASTRUCTURE


async def test_only_items_with_the_chosen_failure_are_retried(harness: RunHarness) -> None:
    await harness.submit(3)
    kinds = (None, FailureKind.MODEL, FailureKind.INFRASTRUCTURE)
    for claim, kind in zip(await harness.queue.claim(3), kinds, strict=True):
        await harness.queue.finish(claim, build_outcome(claim, kind))
    assert await harness.queue.retry("acme", "b", [FailureKind.INFRASTRUCTURE]) == 1
    assert (await harness.queue.batch("acme", "b")).state is BatchState.IN_PROGRESS
    (again,) = await harness.queue.claim(9)
    assert (again.run, again.record.attempt, again.is_resumed) == ("b-3", 2, False)
    assert await harness.queue.finish(again, build_outcome(again))
    record = await harness.queue.batch("acme", "b")
    assert (record.state, record.succeeded, record.failed[FailureKind.INFRASTRUCTURE]) == (BatchState.COMPLETED, 2, 0)
    assert [run for _, run in await harness.queue.ended("acme", "b", 3)] == ["b-3"]


async def test_a_cancelled_batch_starts_nothing_and_ends_every_item(harness: RunHarness) -> None:
    await harness.submit(AT_ONCE + 50, concurrency=2)
    running = await harness.queue.claim(9)
    assert await harness.queue.cancel("acme", "b") == AT_ONCE + 48
    assert await harness.queue.claim(9) == []
    assert await harness.queue.renew(running) == (set(), {("acme", "b-1"), ("acme", "b-2")})
    for claim in running:
        await harness.queue.finish(claim, build_outcome(claim, FailureKind.CANCELLED))
    record = await harness.queue.batch("acme", "b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, AT_ONCE + 50)
