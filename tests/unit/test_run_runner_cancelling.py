"""Runs of a batch that is being cancelled: each ends, once, and no run remains that no process resumes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from contract.calls import ToolResult
from contract.run_events import CallFinished, FailureKind
from orchestrator.runs import runner as runner_module
from orchestrator.runs.journal import Journal
from store.batches import BatchState, ItemOutcome
from store.runs import RunClaim
from tests.conftest import RedisProcess
from tests.runner_ground import BATCH, House, WatchedQueue, Worker, open_house, outcome_of


@pytest.fixture
async def house(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with open_house(redis_server, monkeypatch) as house:
        yield house


async def test_a_running_item_of_a_cancelled_batch_ends_as_cancelled(house: House) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        tell(CallFinished(run=claim.run, result=ToolResult(call_id="c1", name="echo", success=True)))
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    await house.submit(3, concurrency=1)
    worker = Worker(work)
    async with house.working(house.runner(worker)):
        await worker.has_begun.wait()
        assert await house.queue.cancel(*BATCH) == 2
        await house.until(BatchState.CANCELLED)
    record = await house.queue.batch(*BATCH)
    assert (record.failed[FailureKind.CANCELLED], worker.abandoned) == (3, ["b-1"])
    (end,) = await house.ends()
    assert (end.failure and end.failure.kind, end.calls, end.attempt) == (FailureKind.CANCELLED, 1, 1)


async def test_an_outcome_that_is_being_noted_is_not_disturbed_by_a_cancelled_batch(house: House) -> None:
    await house.submit(1)
    worker, queue = Worker(), WatchedQueue(house.client)
    queue.may_note.clear()
    worker.may_end.set()
    async with house.working(house.runner(worker, queue)):
        await queue.noting.wait()
        await house.queue.cancel(*BATCH)
        queue.renewed.clear()
        await queue.renewed.wait()
        queue.may_note.set()
        await house.until(BatchState.CANCELLED)
    assert (await house.queue.batch(*BATCH)).succeeded == 1
    assert [end.failure for end in await house.ends()] == [None]


async def test_a_failure_in_a_batch_that_is_being_cancelled_is_an_end(house: House) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        await house.queue.cancel(*BATCH)
        return outcome_of(claim, FailureKind.INFRASTRUCTURE)

    await house.submit(1)
    worker = Worker(work)
    async with house.working(house.runner(worker)):
        await house.until(BatchState.CANCELLED)
    assert [(end.failure and end.failure.kind, end.attempt) for end in await house.ends()] == [
        (FailureKind.INFRASTRUCTURE, 1)
    ]


async def test_a_stop_during_a_cancel_leaves_no_open_run(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 1000.0)
    await house.submit(1)
    worker = Worker()
    async with house.working(house.runner(worker)):
        await worker.has_begun.wait()
        await house.queue.cancel(*BATCH)
    assert (await house.queue.batch(*BATCH)).state is BatchState.CANCELLED
    assert worker.abandoned == ["b-1"]
