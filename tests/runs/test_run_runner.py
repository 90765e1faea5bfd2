"""The runner of runs: as many as allowed, held while the process lives, each ended once, also in a cancelled batch. A
failure that is not the item's fault starts the item anew. Runs that must wait continue in the same attempt.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import released_slot
from tests.support.runs.runner_harness import BATCH, RunnerHarness, WatchedQueue, Worker, open_harness, outcome_of
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ModelDenied
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.run_events import (
    BatchNotice,
    CallFinished,
    FailureKind,
    RunEnded,
    RunEvent,
    RunRetried,
    SessionOpening,
    StepFinished,
)
from toolcrew.orchestrator.runs import run_gate as gate_module
from toolcrew.orchestrator.runs import runner as runner_module
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.run_gate import RunDeferred
from toolcrew.store.batches import BatchState, ItemOutcome
from toolcrew.store.run_log import RunLog
from toolcrew.store.run_queue import RunClaim, RunQueue
from toolcrew.store.run_records import RunState


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerHarness]:
    async with open_harness(redis_server, monkeypatch) as harness:
        yield harness


async def test_runner_works_at_its_concurrency_until_all_runs_ended(harness: RunnerHarness) -> None:
    busiest = 0

    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
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


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [(FailureKind.INFRASTRUCTURE, 3), (FailureKind.MODEL, 1), (FailureKind.TOOL, 1), (FailureKind.INPUT, 1)],
)
async def test_only_infrastructure_failures_are_retried_up_to_a_limit(
    harness: RunnerHarness, kind: FailureKind, attempts: int
) -> None:
    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        return outcome_of(claim, kind)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert worker.begun == [("b-1", attempt) for attempt in range(1, attempts + 1)]
    events = [event for event in await harness.batch_events() if isinstance(event, RunRetried | RunEnded)]
    retries = [(RunRetried, attempt) for attempt in range(2, attempts + 1)]
    assert [(type(event), event.attempt) for event in events] == [*retries, (RunEnded, attempts)]
    (record,) = await harness.queue.records([("acme", "b-1")])
    assert (record.outcome.attempt, record.failure) == (attempts, kind.value)


async def test_stopped_runner_gives_its_runs_back(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
    (claim,) = await harness.other.claim(9, BATCH)
    assert (claim.run, claim.record.attempt) == ("b-1", 1)
    assert (await harness.ends(), worker.abandoned) == ([], [])


async def test_runner_stopped_while_storing_an_outcome_stores_it(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client)
    worker.may_end.set()
    queue.may_note.clear()
    async with harness.working(harness.runner(worker, queue)):
        await queue.noting.wait()
        asyncio.get_running_loop().call_later(0.05, queue.may_note.set)
    assert (await harness.queue.batches.get(*BATCH)).succeeded == 1
    assert [end.run for end in await harness.ends()] == ["b-1"]


async def test_lease_of_a_running_run_is_renewed(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client)
    async with harness.working(harness.runner(worker, queue, concurrency=1)):
        await worker.has_begun.wait()
        (claim,) = [run.claim for run in (await harness.queue.records([("acme", "b-1")])) if run is not None]
        await harness.client.zadd("toolcrew:d:runs:leases", {"acme|b-1": 1.0})
        queue.renewed.clear()
        await queue.renewed.wait()
        assert await harness.other.claim(1, BATCH) == []
        (record,) = await harness.queue.records([("acme", "b-1")])
        assert record.claim == claim


async def test_run_taken_by_another_process_is_dropped(harness: RunnerHarness) -> None:
    cancelled = asyncio.Event()

    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
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
    (record,) = await harness.queue.records([("acme", "b-1")])
    assert (record.claim, record.state) == ("another", RunState.RUNNING)
    assert (await harness.ends(), worker.abandoned) == ([], [])


async def test_run_with_a_lost_lease_is_never_run_twice_concurrently(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 1000.0)
    at_work: list[str] = []
    second_start = asyncio.Event()

    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        at_work.append(claim.token)
        assert len(at_work) == 1
        try:
            if len(worker.begun) == 1:
                await asyncio.Event().wait()
            second_start.set()
            return outcome_of(claim)
        finally:
            at_work.remove(claim.token)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        await harness.client.zadd("toolcrew:d:runs:leases", {"acme|b-1": 1.0})
        await second_start.wait()
        await harness.until(BatchState.COMPLETED)
    assert (worker.begun, len(await harness.ends())) == ([("b-1", 1)] * 2, 1)


async def test_outcome_is_stored_after_a_redis_outage(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client, outages=3)
    worker.may_end.set()
    async with harness.working(harness.runner(worker, queue)):
        await harness.until(BatchState.COMPLETED)
    assert (worker.begun, queue.outages, len(await harness.ends())) == ([("b-1", 1)], 0, 1)


async def test_run_waits_while_its_log_cannot_be_loaded(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_run_with_a_log_of_another_release_fails_and_keeps_the_log(harness: RunnerHarness) -> None:
    await harness.submit(1)
    await harness.client.rpush("toolcrew:d:t:acme:run.b-1:log", '{"type": "from the future"}')
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    (end,) = await harness.ends()
    assert (worker.begun, end.failure.kind, end.attempt) == ([], FailureKind.INFRASTRUCTURE, 1)
    assert "retry the item" in end.failure.message
    assert await harness.queue.batches.retry(*BATCH, [FailureKind.INFRASTRUCTURE]) == 1
    assert not await harness.client.exists("toolcrew:d:t:acme:run.b-1:log")


async def test_end_event_reports_calls_steps_tokens_and_cost(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        for number in (1, 2, 2):
            result = ToolResult(call_id=f"c{number}", name="echo", success=True)
            on_event(CallFinished(run=claim.run, result=result, seconds=0.1))
            on_event(StepFinished(run=claim.run, step=number, model_s=0.0, usage=TokenUsage()))
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


async def test_exception_in_one_run_does_not_stop_others(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        if claim.run == "b-1" and worker.begun.count(("b-1", 1)) == 1:
            raise KeyError("oops")
        return outcome_of(claim)

    await harness.submit(3)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await wait_until_async(
            lambda: harness.queue.batches.get(*BATCH),
            SOON_S,
            "two have succeeded",
            0.01,
            lambda batch: batch.succeeded >= 2,
        )
        assert await harness.queue.batches.counts(*BATCH) == {"waiting": 0, "running": 1}
        await harness.client.zadd("toolcrew:d:runs:leases", {"acme|b-1": 1.0})
        await harness.until(BatchState.COMPLETED)
    assert worker.begun.count(("b-1", 1)) == 2


async def test_running_run_of_a_cancelled_batch_ends_as_cancelled(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        on_event(CallFinished(run=claim.run, result=ToolResult(call_id="c1", name="echo", success=True)))
        await asyncio.Event().wait()
        raise AssertionError("no code sets it")

    await harness.submit(3, concurrency=1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        assert await harness.queue.batches.cancel(*BATCH) == 2
        await harness.until(BatchState.CANCELLED)
    record = await harness.queue.batches.get(*BATCH)
    assert (record.failed[FailureKind.CANCELLED], worker.abandoned) == (3, ["b-1"])
    (end,) = await harness.ends()
    assert (end.failure and end.failure.kind, end.calls, end.attempt) == (FailureKind.CANCELLED, 1, 1)


async def test_outcome_being_stored_is_not_lost_by_a_cancel(harness: RunnerHarness) -> None:
    await harness.submit(1)
    worker, queue = Worker(), WatchedQueue(harness.client)
    queue.may_note.clear()
    worker.may_end.set()
    async with harness.working(harness.runner(worker, queue)):
        await queue.noting.wait()
        await harness.queue.batches.cancel(*BATCH)
        queue.renewed.clear()
        await queue.renewed.wait()
        queue.may_note.set()
        await harness.until(BatchState.CANCELLED)
    assert (await harness.queue.batches.get(*BATCH)).succeeded == 1
    assert [end.failure for end in await harness.ends()] == [None]


async def test_failure_in_a_batch_being_cancelled_is_not_retried(harness: RunnerHarness) -> None:
    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        await harness.queue.batches.cancel(*BATCH)
        return outcome_of(claim, FailureKind.INFRASTRUCTURE)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.CANCELLED)
    assert [(end.failure and end.failure.kind, end.attempt) for end in await harness.ends()] == [
        (FailureKind.INFRASTRUCTURE, 1)
    ]


async def test_runner_stopped_during_a_cancel_leaves_no_open_run(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 1000.0)
    await harness.submit(1)
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        await harness.queue.batches.cancel(*BATCH)
    assert (await harness.queue.batches.get(*BATCH)).state is BatchState.CANCELLED
    assert worker.abandoned == ["b-1"]


class SlowQueue(RunQueue):
    """Answers claims when the test allows it."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        super().__init__(client, "d", KEY)
        self.claiming = asyncio.Event()
        self.may_claim = asyncio.Event()
        self.may_claim.set()

    async def claim(self, most: int, *arguments: Any) -> list[RunClaim]:
        if not self.may_claim.is_set():
            self.claiming.set()
            await self.may_claim.wait()
        return await super().claim(most, *arguments)


class SlotScenario:
    """The first run's only call waits for an answer, and no claim is answered from then on until the test allows it.
    The other run works until the test ends it.
    """

    def __init__(self, queue: SlowQueue) -> None:
        self.queue = queue
        self.worker = Worker(self._work)
        self.answered, self.is_back, self.has_begun, self.may_end = (asyncio.Event() for _ in range(4))

    async def _work(self, claim: RunClaim, journal: Journal, on_event: Callable[[RunEvent], None]) -> ItemOutcome:
        async with self.worker.slots.run() as slot:
            if claim.run == "b-1":
                self.queue.may_claim.clear()
                async with slot.call("call"), released_slot(slot, "call"):
                    await self.answered.wait()
                self.is_back.set()
            else:
                self.has_begun.set()
                await self.may_end.wait()
        return outcome_of(claim)


async def test_run_whose_slot_was_claimed_waits_for_the_next_slot(harness: RunnerHarness) -> None:
    await harness.submit(2)
    scenario = SlotScenario(queue := SlowQueue(harness.client))
    async with harness.working(harness.runner(scenario.worker, queue, concurrency=1)):
        await queue.claiming.wait()
        scenario.answered.set()
        await run_event_loop()
        assert not scenario.is_back.is_set(), "the slot may be another one's by now"
        queue.may_claim.set()
        await scenario.has_begun.wait()
        await run_event_loop()
        assert not scenario.is_back.is_set(), "the slot is another one's"
        scenario.may_end.set()
        await scenario.is_back.wait()
        await harness.until(BatchState.COMPLETED)


async def run_event_loop() -> None:
    """Let everything run that can continue without Redis."""
    for _ in range(20):
        await asyncio.sleep(0)


# Runs that must wait


class FailingWorker(Worker):
    """Raises these errors in order, and then every item succeeds."""

    def __init__(self, *troubles: Exception) -> None:
        super().__init__(self._fail_first)
        self.resumed: list[bool] = []
        self._troubles = list(troubles)

    async def _fail_first(self, claim: RunClaim, journal: Journal, on_event: Callable[[RunEvent], None]) -> ItemOutcome:
        self.resumed.append(claim.is_resumed)
        if not journal.is_resumed:
            await journal.record(SessionOpening, session="s")
        if self._troubles:
            raise self._troubles.pop(0)
        self.gate.record_answer(claim.run)
        return outcome_of(claim)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runner_module, gate_module):
        monkeypatch.setattr(module, "QUOTA_RETRY_S", 0.02)
    monkeypatch.setattr(gate_module, "PAUSES_S", (0.01,))


@pytest.mark.parametrize("cause", ["endpoint", "request", "quota"])
async def test_deferred_run_continues_in_the_same_attempt(
    harness: RunnerHarness, short_waits: None, cause: Any
) -> None:
    await harness.submit(1)
    worker = FailingWorker(RunDeferred("down", cause), RunDeferred("down", cause))
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert (worker.begun, worker.resumed) == ([("b-1", 1)] * 3, [False, True, True])
    assert (await harness.queue.batches.get(*BATCH)).succeeded == 1
    assert not any(isinstance(event, RunRetried) for event in await harness.batch_events())


async def test_start_and_end_of_a_wait_are_reported_once(harness: RunnerHarness, short_waits: None) -> None:
    await harness.submit(3, concurrency=1)
    worker = FailingWorker(*[RunDeferred("it is down", "endpoint")] * 3, *[RunDeferred("full", "quota")] * 2)
    worker.gate.has_answered_since(worker.gate.now())
    runner = harness.runner(worker)
    async with harness.working(runner) as (task,):
        await harness.until(BatchState.COMPLETED)
        runner.drain()
        await task
    notes = [event.message for event in await harness.batch_events() if isinstance(event, BatchNotice)]
    assert sum("full" in note for note in notes) == 1
    waits = sum("the batch waits for its model" in note for note in notes)
    assert waits == sum("answers again" in note for note in notes) >= 1


async def test_model_that_denies_access_stops_the_runner_and_fails_no_item(
    harness: RunnerHarness, short_waits: None
) -> None:
    await harness.submit(8)
    worker = FailingWorker(*[ModelDenied("check the key")] * 8)
    async with harness.working(harness.runner(worker)) as (task,):
        with pytest.raises(ModelDenied, match="check the key"):
            await task
    record = await harness.queue.batches.get(*BATCH)
    assert (record.succeeded, sum(record.failed.values())) == (0, 0)
    assert await harness.queue.batches.counts(*BATCH) == {"waiting": 8, "running": 0}
    assert len(worker.begun) <= 4
