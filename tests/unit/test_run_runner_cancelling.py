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
from tests.runner_harness import BATCH, RunnerHarness, WatchedQueue, Worker, open_harness, outcome_of


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerHarness]:
    async with open_harness(redis_server, monkeypatch) as harness:
        yield harness


async def test_a_running_item_of_a_cancelled_batch_ends_as_cancelled(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        tell(CallFinished(run=claim.run, result=ToolResult(call_id="c1", name="echo", success=True)))
        await asyncio.Event().wait()
        raise AssertionError("no code sets it")

    await harness.submit(3, concurrency=1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        assert await harness.queue.cancel(*BATCH) == 2
        await harness.until(BatchState.CANCELLED)
    record = await harness.queue.batch(*BATCH)
    assert (record.failed[FailureKind.CANCELLED], worker.abandoned) == (3, ["b-1"])
    (end,) = await harness.ends()
    assert (end.failure and end.failure.kind, end.calls, end.attempt) == (FailureKind.CANCELLED, 1, 1)


async def test_an_outcome_that_is_being_noted_is_not_disturbed_by_a_cancelled_batch(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client)
    queue.may_note.clear()
    worker.may_end.set()
    async with harness.working(harness.runner(worker, queue)):
        await queue.noting.wait()
        await harness.queue.cancel(*BATCH)
        queue.renewed.clear()
        await queue.renewed.wait()
        queue.may_note.set()
        await harness.until(BatchState.CANCELLED)
    assert (await harness.queue.batch(*BATCH)).succeeded == 1
    assert [end.failure for end in await harness.ends()] == [None]


async def test_a_failure_in_a_batch_that_is_being_cancelled_is_an_end(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        await harness.queue.cancel(*BATCH)
        return outcome_of(claim, FailureKind.INFRASTRUCTURE)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.CANCELLED)
    assert [(end.failure and end.failure.kind, end.attempt) for end in await harness.ends()] == [
        (FailureKind.INFRASTRUCTURE, 1)
    ]


async def test_a_stop_during_a_cancel_leaves_no_open_run(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 1000.0)
    await harness.submit(1)
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        await harness.queue.cancel(*BATCH)
    assert (await harness.queue.batch(*BATCH)).state is BatchState.CANCELLED
    assert worker.abandoned == ["b-1"]
