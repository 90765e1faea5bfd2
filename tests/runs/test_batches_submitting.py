"""Batches submitted by programs: created once per id, resumed by id, and retried by kind of failure."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness, build_item, build_outcome
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_events import BatchNotice, FailureKind
from toolcrew.orchestrator.batches.lines import BatchFile
from toolcrew.orchestrator.runs.batches import Batches, run_id
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.store.batch_store import BatchStore
from toolcrew.store.batches import BatchDefaults, BatchItem, BatchState
from toolcrew.store.run_events import BatchEventReader
from toolcrew.store.run_queue import RunQueue
from toolcrew.store.stored_runs import AT_ONCE

KINDS = (None, FailureKind.MODEL, FailureKind.INFRASTRUCTURE)


class Harness(RunHarness):
    def __init__(self, client: "redis.asyncio.Redis") -> None:
        super().__init__(client)
        self.batches = Batches(self.queue, RunEventPublisher(client, "d"), "acme")

    async def end(self, *kinds: FailureKind | None) -> list[str]:
        """End the waiting items with this outcome. Return the items."""
        claims = await self.queue.claim(len(kinds), ("acme", "b"))
        for claim, kind in zip(claims, kinds, strict=False):
            await self.queue.finish(claim, build_outcome(claim, kind))
        return [claim.record.item.custom_id for claim in claims]


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield Harness(client)


def build_file(count: int, sha256: str = "a" * 64) -> BatchFile:
    return BatchFile(tuple(build_item(number) for number in range(1, count + 1)), sha256, 100, None)


async def test_a_repeated_submission_changes_nothing(harness: Harness) -> None:
    await harness.batches.submit(build_file(3), batch="b", defaults=BatchDefaults(model="m"), goes_on=False)
    await harness.end(*KINDS)
    before = await harness.batches.status("b")
    assert before.state is BatchState.COMPLETED
    await harness.batches.submit(
        build_file(3), batch="b", concurrency=2, defaults=BatchDefaults(model="n"), goes_on=False
    )
    assert await harness.batches.status("b") == before
    assert await harness.end(None) == []


async def test_a_repeated_submission_completes_an_interrupted_one(harness: Harness) -> None:
    await harness.batches.submit(build_file(3), batch="b", goes_on=False)
    await forget_item(harness, "item-2")
    await harness.batches.submit(build_file(3), batch="b", goes_on=False)
    assert sorted(await harness.end(None, None, None)) == ["item-1", "item-2", "item-3"]


async def forget_item(harness: Harness, custom_id: str) -> None:
    """Remove the item, as if the submission had stopped before its line."""
    run = run_id("acme", "b", custom_id)
    await harness.client.delete(f"toolcrew:d:t:acme:run.{run}")
    await harness.client.zrem("toolcrew:d:t:acme:batch.b:waiting", run)
    await harness.client.lrem("toolcrew:d:t:acme:batch.b:items", 1, run)


async def test_another_file_with_the_same_batch_id_is_refused(harness: Harness) -> None:
    await harness.batches.submit(build_file(2), batch="b")
    with pytest.raises(ToolFailure, match="another file"):
        await harness.batches.submit(build_file(3, "b" * 64), batch="b", concurrency=1)
    record = await harness.batches.status("b")
    assert (record.total, record.concurrency, await harness.batches.custom_ids("b")) == (
        2,
        16,
        {f"item-{number}": run_id("acme", "b", f"item-{number}") for number in (1, 2)},
    )


async def test_resume_retries_only_the_requested_failure_kinds_and_only_once(harness: Harness) -> None:
    await harness.batches.submit(build_file(3), batch="b")
    await harness.end(*KINDS)
    assert await harness.batches.resume("b", [FailureKind.TOOL]) == 0
    assert await harness.batches.resume("b", [FailureKind.MODEL]) == 1
    assert await harness.batches.resume("b", [FailureKind.MODEL]) == 0
    assert await harness.end(None) == ["item-2"]
    events = await harness.client.xlen("toolcrew:d:t:acme:batch.b:events")
    assert await harness.batches.resume("b", [FailureKind.MODEL]) == 0
    assert (await harness.batches.status("b")).state is BatchState.COMPLETED
    assert await harness.client.xlen("toolcrew:d:t:acme:batch.b:events") == events > 0


async def test_items_lost_by_redis_run_after_the_file_is_submitted_again(harness: Harness) -> None:
    await harness.batches.submit(build_file(3), batch="b")
    await harness.client.delete(*(f"toolcrew:d:t:acme:run.{run_id('acme', 'b', f'item-{line}')}" for line in (1, 2)))
    assert await harness.end(None, None, None) == ["item-3"]
    record = await harness.batches.status("b")
    assert (record.state, record.failed[FailureKind.INFRASTRUCTURE]) == (BatchState.COMPLETED, 2)
    await harness.batches.submit(build_file(3), batch="b")
    assert (await harness.batches.status("b")).state is BatchState.IN_PROGRESS
    assert await harness.end(None) == ["item-1"]
    assert await harness.end(None) == ["item-2"]
    record = await harness.batches.status("b")
    assert (record.state, record.succeeded, record.failed[FailureKind.INFRASTRUCTURE]) == (BatchState.COMPLETED, 3, 0)
    assert await harness.queue.batches.count_items("acme", "b") == 3


async def test_a_submission_stops_when_its_batch_is_cancelled(harness: Harness) -> None:
    file = build_file(2 * AT_ONCE)

    class CancelledWhileAdding(BatchStore):
        async def add(self, tenant: str, batch: str, runs: Iterable[tuple[str, BatchItem]]) -> int:
            remaining_runs = iter(runs)
            added = await super().add(tenant, batch, islice(remaining_runs, AT_ONCE))
            await self.cancel(tenant, batch)
            return added + await super().add(tenant, batch, remaining_runs)

    queue = RunQueue(harness.client, "d", KEY)
    queue.batches = CancelledWhileAdding(harness.client, "d", KEY)
    batches = Batches(queue, RunEventPublisher(harness.client, "d"), "acme")
    with pytest.raises(ToolFailure, match="submit the same file again with `--id b --tenant acme`") as failure:
        await batches.submit(file, batch="b")
    assert failure.value.code is ErrorCode.CANCELLED
    record = await harness.batches.status("b")
    assert (record.state, record.failed[FailureKind.CANCELLED]) == (BatchState.CANCELLED, AT_ONCE)


async def test_run_ids_differ_between_tenants_batches_and_items() -> None:
    names = {
        run_id(*names)
        for names in (("a", "b", "c"), ("a", "bc", ""), ("ab", "c", ""), ("a", "b", "d"), ("a", "", "b\0c"))
    }
    assert len(names) == 5
    assert run_id("a", "b", "c") == run_id("a", "b", "c")


class LateReplies(redis.asyncio.Redis):
    """A connection on which the first reply to a pipeline arrives late. `executed`: Redis has executed the pipeline."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.executed = asyncio.Event()
        self.may_arrive = asyncio.Event()

    def pipeline(self, *arguments: Any, **fields: Any) -> Any:
        pipe = super().pipeline(*arguments, **fields)
        execute = pipe.execute

        async def execute_late() -> Any:
            reply = await execute()
            self.executed.set()
            await self.may_arrive.wait()
            return reply

        pipe.execute = execute_late  # type: ignore[method-assign,assignment]
        return pipe


async def test_a_flush_during_a_write_stores_each_event_once(redis_server: RedisProcess) -> None:
    async with LateReplies.from_url(redis_server.url, socket_timeout=5) as client:
        await client.hset("toolcrew:d:t:acme:batch.b", "state", "in_progress")
        publisher = RunEventPublisher(client, "d")
        publisher.add("acme", "b", BatchNotice(message="first"))
        await client.executed.wait()
        publisher.add("acme", "b", BatchNotice(message="last"))
        asyncio.get_running_loop().call_later(0.05, client.may_arrive.set)
        await publisher.flush()
        events = await BatchEventReader(client, "d", "acme", "b").read(0)
    assert [getattr(event, "message", "") for event in events] == ["first", "last"]
