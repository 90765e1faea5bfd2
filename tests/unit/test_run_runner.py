"""The runner of runs: as many as allowed, held while the process lives, each ended once. A failure that is not the
item's fault starts the item anew.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from contract.calls import ToolResult
from contract.errors import BrokerUnavailable
from contract.functions.completions import Usage
from contract.run_events import CallFinished, FailureKind, RunEnded, RunRetried, StepFinished
from orchestrator.runs import runner as runner_module
from orchestrator.runs.journal import Journal
from store.batches import BatchState, ItemOutcome
from store.run_log import RunLog
from store.run_records import RunState
from store.runs import RunClaim
from tests.conftest import RedisProcess
from tests.runner_harness import BATCH, RunnerHarness, WatchedQueue, Worker, open_harness, outcome_of
from tests.waiting import wait_until_async


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerHarness]:
    async with open_harness(redis_server, monkeypatch) as harness:
        yield harness


async def test_it_works_as_many_at_a_time_as_it_may_and_goes_on_when_one_has_ended(harness: RunnerHarness) -> None:
    busiest = 0

    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        nonlocal busiest
        busiest = max(busiest, runner.running)
        await asyncio.sleep(0)
        return outcome_of(claim)

    await harness.submit(9)
    worker = Worker(work)
    runner = harness.runner(worker, concurrency=3)
    async with harness.working(runner):
        await harness.until(BatchState.COMPLETED)
    assert (sorted(worker.begun), busiest) == ([(f"b-{number}", 1) for number in range(1, 10)], 3)
    assert sorted(end.item for end in await harness.ends()) == [f"item-{number}" for number in range(1, 10)]


async def test_two_processes_share_a_batch_and_work_each_item_once(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        await asyncio.gather(first.has_begun.wait(), two.has_begun.wait())
        return outcome_of(claim)

    await harness.submit(30)
    first, two = Worker(work), Worker(work)
    async with harness.working(harness.runner(first, concurrency=2), harness.runner(two, harness.other, concurrency=2)):
        await harness.until(BatchState.COMPLETED)
    assert sorted(first.begun + two.begun) == sorted((f"b-{number}", 1) for number in range(1, 31))
    assert min(len(first.begun), len(two.begun)) > 0
    assert len(await harness.ends()) == 30


async def test_infrastructure_failures_are_retried_up_to_a_limit(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        return outcome_of(claim, FailureKind.INFRASTRUCTURE)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert worker.begun == [("b-1", attempt) for attempt in (1, 2, 3)]
    events = [event for event in await harness.batch_events() if isinstance(event, RunRetried | RunEnded)]
    assert [(type(event), event.attempt) for event in events] == [(RunRetried, 2), (RunRetried, 3), (RunEnded, 3)]
    (record,) = await harness.queue.runs([("acme", "b-1")])
    assert record is not None
    assert record.outcome is not None
    assert (record.outcome.attempt, record.failure) == (3, "infrastructure")


@pytest.mark.parametrize("kind", [FailureKind.MODEL, FailureKind.TOOL, FailureKind.INPUT])
async def test_other_failures_are_not_retried(harness: RunnerHarness, kind: FailureKind) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        return outcome_of(claim, kind)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert worker.begun == [("b-1", 1)]


async def test_draining_ends_what_runs_and_begins_nothing(harness: RunnerHarness) -> None:
    await harness.submit(5)
    worker = Worker()
    runner = harness.runner(worker, concurrency=2)
    async with harness.working(runner) as (task,):
        await worker.has_begun.wait()
        runner.drain()
        worker.may_end.set()
        await task
    assert len(worker.begun) <= 2
    assert (await harness.queue.batch(*BATCH)).succeeded == len(worker.begun)


async def test_a_process_that_stops_gives_back_what_runs_for_another_to_go_on_with(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
    (claim,) = await harness.other.claim(9, BATCH)
    assert (claim.run, claim.record.attempt) == ("b-1", 1)
    assert (await harness.ends(), worker.abandoned) == ([], [])


async def test_a_process_that_stops_while_it_stores_an_outcome_loses_no_end(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client)
    worker.may_end.set()
    queue.may_note.clear()
    async with harness.working(harness.runner(worker, queue)):
        await queue.noting.wait()
        asyncio.get_running_loop().call_later(0.05, queue.may_note.set)
    assert (await harness.queue.batch(*BATCH)).succeeded == 1
    assert [end.run for end in await harness.ends()] == ["b-1"]


async def test_the_lease_of_a_running_item_is_renewed(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client)
    async with harness.working(harness.runner(worker, queue, concurrency=1)):
        await worker.has_begun.wait()
        (claim,) = [run.claim for run in (await harness.queue.runs([("acme", "b-1")])) if run is not None]
        await harness.client.zadd("toolcrew:d:runs:leases", {"acme|b-1": 1.0})
        queue.renewed.clear()
        await queue.renewed.wait()
        assert await harness.other.claim(1, BATCH) == []
        (record,) = await harness.queue.runs([("acme", "b-1")])
        assert record is not None
        assert record.claim == claim


async def test_a_run_taken_by_another_process_is_dropped(harness: RunnerHarness) -> None:
    cancelled = asyncio.Event()

    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("no code sets it")

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker, concurrency=1)):
        await worker.has_begun.wait()
        # Redis gives the run to another process after the lease has expired.
        await harness.client.hset("toolcrew:d:t:acme:run.b-1", "claim", "another")
        await cancelled.wait()
        await harness.client.hset("toolcrew:d:t:acme:run.b-1", "state", "running")
    (record,) = await harness.queue.runs([("acme", "b-1")])
    assert record is not None
    assert (record.claim, record.state) == ("another", RunState.RUNNING)
    assert (await harness.ends(), worker.abandoned) == ([], [])


async def test_a_run_with_a_lost_lease_runs_once(harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 1000.0)
    at_work: list[str] = []
    again = asyncio.Event()

    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        at_work.append(claim.token)
        assert len(at_work) == 1
        try:
            if len(worker.begun) == 1:
                await asyncio.Event().wait()
            again.set()
            return outcome_of(claim)
        finally:
            at_work.remove(claim.token)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        await harness.client.zadd("toolcrew:d:runs:leases", {"acme|b-1": 1.0})
        await again.wait()
        await harness.until(BatchState.COMPLETED)
    assert (worker.begun, len(await harness.ends())) == ([("b-1", 1)] * 2, 1)


async def test_an_outcome_is_noted_however_long_redis_is_away(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client, outages=3)
    worker.may_end.set()
    async with harness.working(harness.runner(worker, queue)):
        await harness.until(BatchState.COMPLETED)
    assert (worker.begun, queue.outages, len(await harness.ends())) == ([("b-1", 1)], 0, 1)


async def test_a_run_with_an_unreadable_log_waits(harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    load, outages = RunLog.load, [BrokerUnavailable("away")] * 3

    async def load_later(*arguments: Any) -> RunLog:
        if outages:
            raise outages.pop()
        return await load(*arguments)

    monkeypatch.setattr(RunLog, "load", load_later)
    await harness.submit(1)
    worker = Worker()
    worker.may_end.set()
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert (worker.begun, outages) == ([("b-1", 1)], [])


async def test_a_log_of_another_release_fails_its_item_and_is_not_thrown_away_by_itself(harness: RunnerHarness) -> None:
    await harness.submit(1)
    await harness.client.rpush("toolcrew:d:t:acme:run.b-1:log", '{"type": "from the future"}')
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    (end,) = await harness.ends()
    assert end.failure is not None
    assert (worker.begun, end.failure.kind, end.attempt) == ([], FailureKind.INFRASTRUCTURE, 1)
    assert "retry the item" in end.failure.message
    assert await harness.queue.retry(*BATCH, [FailureKind.INFRASTRUCTURE]) == 1
    assert not await harness.client.exists("toolcrew:d:t:acme:run.b-1:log")


async def test_an_end_reports_what_the_item_took(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        for number in (1, 2, 2):
            result = ToolResult(call_id=f"c{number}", name="echo", success=True)
            tell(CallFinished(run=claim.run, result=result, seconds=0.1))
            tell(StepFinished(run=claim.run, step=number, model_s=0.0, usage=Usage()))
        usage = {"prompt_tokens": 1000, "completion_tokens": 10}
        bodies: dict[str, dict[str, Any]] = {
            "b-1": {"usage": {**usage, "cost": 0.003}},
            "b-2": {"usage": usage, "cost": 7.0, "steps": 3},
            "b-3": {},
        }
        return outcome_of(claim, body=bodies[claim.run])

    await harness.submit(3)
    async with harness.working(harness.runner(Worker(work))):
        await harness.until(BatchState.COMPLETED)
    ends = {end.run: end for end in await harness.ends()}
    assert [(ends[run].calls, ends[run].steps, ends[run].usage.prompt_tokens) for run in sorted(ends)] == [
        (2, 2, 1000),
        (2, 3, 1000),
        (2, 2, 0),
    ]
    assert [ends[run].cost for run in sorted(ends)] == [0.003, 7.0, None]


async def test_a_bug_in_one_run_stops_no_other_and_leaves_it_to_its_lease(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        if claim.run == "b-1" and worker.begun.count(("b-1", 1)) == 1:
            raise KeyError("oops")
        return outcome_of(claim)

    await harness.submit(3)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await wait_until_async(
            lambda: harness.queue.batch(*BATCH), 20, "two have succeeded", 0.01, lambda batch: batch.succeeded >= 2
        )
        assert await harness.queue.counts(*BATCH) == {"waiting": 0, "running": 1}
        await harness.client.zadd("toolcrew:d:runs:leases", {"acme|b-1": 1.0})
        await harness.until(BatchState.COMPLETED)
    assert worker.begun.count(("b-1", 1)) == 2
