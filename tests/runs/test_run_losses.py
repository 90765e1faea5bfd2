"""Runs whose holders die. A run that kills each of its holders ends, and runs that were only in the same process do
not end with it. The sessions of runs that end without execution are closed, whichever process opened them.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.runner_harness import BATCH, RunnerHarness, Worker, outcome_of
from tests.support.stack.waiting import SOON_S, until, wait_until_async
from toolcrew.contract.names import location_key, run_key
from toolcrew.contract.run_events import FailureKind, ModelReplied, RunEvent, SessionOpened, SessionOpening
from toolcrew.orchestrator.runs import runner as runner_module
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.outcomes import ORCHESTRATOR_LOST
from toolcrew.orchestrator.runs.runner import DOUBTFUL_LOSSES, MAX_LOSSES
from toolcrew.store.batches import BatchState, ItemOutcome
from toolcrew.store.run_log import RunAttempt, RunLog, close_left_sessions, entry_purpose, run_log_key
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.sessions import SessionStore


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator["SessionsHarness"]:
    monkeypatch.setattr(runner_module, "CHECK_INTERVAL_S", 0.02)
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield SessionsHarness(client)


async def claim_after_losses(harness: RunnerHarness, times: int) -> list[RunClaim]:
    """Return the run as claimed after the given number of processes died with it."""
    claims = await harness.queue.claim(9)
    for _ in range(times):
        for claim in claims:
            await harness.die(claim)
        claims = await harness.queue.claim(9)
    return claims


async def count_losses(harness: RunnerHarness, run: str = "b-1") -> int:
    (record,) = await harness.queue.records([("acme", run)])
    return record.losses


async def test_run_that_kills_its_processes_ends_as_an_infrastructure_failure(harness: RunnerHarness) -> None:
    await harness.submit(2)
    for claim in await claim_after_losses(harness, MAX_LOSSES - 1):
        if claim.run == "b-1":
            await harness.die(claim)
        else:
            await harness.queue.finish(claim, outcome_of(claim))
    worker = Worker()
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert worker.begun == []
    (record,) = await harness.queue.records([("acme", "b-1")])
    assert record.outcome.failure is not None
    failure = record.outcome.failure
    assert failure.kind == FailureKind.INFRASTRUCTURE
    assert failure.code == ORCHESTRATOR_LOST
    assert "5 times in a row" in failure.message
    assert await harness.queue.batches.retry(*BATCH, [FailureKind.INFRASTRUCTURE]) == 1
    assert await count_losses(harness) == 0


@pytest.mark.parametrize(
    ("event", "remaining_losses"),
    [(ModelReplied(run="b-1", at=1.0, chunks=()), 0), (SessionOpening(run="b-1", at=1.0, session="s"), 2)],
    ids=["a reply", "a session that is about to be opened"],
)
async def test_model_reply_resets_the_loss_count_of_a_run(
    harness: RunnerHarness, event: RunEvent, remaining_losses: int
) -> None:
    await harness.submit(1)
    (claim,) = await claim_after_losses(harness, 2)
    assert (claim.record.losses, await count_losses(harness)) == (2, 2)
    run_log = await RunLog.load(harness.client, "d", KEY, RunAttempt("acme", "b-1", claim.record.attempt, claim.token))
    await run_log.append(event)
    assert (await count_losses(harness), run_log.has_grown) == (remaining_losses, remaining_losses == 0)


async def test_loss_is_counted_and_a_run_given_back_is_not_a_loss(harness: RunnerHarness) -> None:
    await harness.submit(1, is_detached=False)
    (claim,) = await harness.queue.claim(1, BATCH)
    await harness.queue.give_back(claim)
    (claim,) = await harness.queue.claim(1, BATCH)
    assert claim.record.losses == 0
    await harness.die(claim)
    assert await harness.other.claim(9) == []
    (next_claim,) = await harness.queue.claim(1, BATCH)
    assert next_claim.record.losses == 1
    await harness.queue.give_back(next_claim, is_new=True)
    assert await count_losses(harness) == 0


async def test_runs_with_many_losses_are_run_one_at_a_time(
    harness: RunnerHarness,
) -> None:
    await harness.submit(3)
    for claim in await claim_after_losses(harness, DOUBTFUL_LOSSES - 1):
        await harness.die(claim)
    running: set[str] = set()
    together: list[set[str]] = []

    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        running.add(claim.run)
        together.append(set(running))
        await worker.may_end.wait()
        running.discard(claim.run)
        return outcome_of(claim)

    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await worker.has_begun.wait()
        # The two other runs are already back in the queue, to be claimed later.
        delayed = "toolcrew:d:runs:delayed"
        await wait_until_async(
            lambda: harness.client.zcard(delayed), SOON_S, "two wait", 0.01, lambda count: count >= 2
        )
        worker.may_end.set()
        await harness.until(BatchState.COMPLETED)
    assert sorted(len(runs) for runs in together) == [1, 1, 1]


async def test_progress_of_a_run_with_many_losses_lets_the_next_one_start(harness: RunnerHarness) -> None:
    await harness.submit(2)
    for claim in await claim_after_losses(harness, DOUBTFUL_LOSSES - 1):
        await harness.die(claim)
    both: set[str] = set()

    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        both.add(claim.run)
        await journal.record_reply([])
        if len(both) == 2:
            worker.may_end.set()
        await worker.may_end.wait()
        return outcome_of(claim)

    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
    assert both == {"b-1", "b-2"}


async def test_manual_retry_resets_the_automatic_retries(
    harness: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_AFTER_S", (0.001,))

    async def work(claim: RunClaim, journal: Journal, on_event: Any) -> ItemOutcome:
        return outcome_of(claim, FailureKind.INFRASTRUCTURE)

    await harness.submit(1)
    worker = Worker(work)
    async with harness.working(harness.runner(worker)):
        await harness.until(BatchState.COMPLETED)
        assert await harness.queue.batches.retry(*BATCH, [FailureKind.INFRASTRUCTURE]) == 1
        await harness.until(BatchState.COMPLETED)
    assert [attempt for _, attempt in worker.begun] == [1, 2, 3, 4, 5, 6]


class SessionsHarness(RunnerHarness):
    """Runs that have sessions."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        super().__init__(client)
        self.places = SessionStore(client, "d")

    async def open(self, claim: RunClaim, *sessions: str) -> None:
        """Open the sessions as a process does that dies while it opens each session but the last."""
        run_log = await RunLog.load(self.client, "d", KEY, claim.attempt)
        for session in sessions:
            await run_log.append(SessionOpening(run=claim.run, at=1.0, session=session))
            await self.places.open(claim.tenant, session, "host.a.b1", start="{}", ttl_s=60.0, limit=100)
        await run_log.append(SessionOpened(run=claim.run, at=1.0, session=sessions[-1], info={}))
        await run_log.append(ModelReplied(run=claim.run, at=1.0, chunks=({"choices": []},)))

    async def closed(self, *sessions: str) -> list[bool]:
        keys = [location_key("d", "acme", session) for session in sessions]
        return [await self.client.hget(key, "state") == b"closed" for key in keys]


async def test_cancel_closes_sessions_of_queued_and_lost_runs(harness: SessionsHarness) -> None:
    await harness.submit(4)
    given_back, later, working, dead = claims = await harness.queue.claim(4)
    for claim in claims:
        await harness.open(claim, f"of-{claim.run}")
    await harness.queue.give_back(given_back)
    await harness.queue.give_back(later, after_s=1000.0)
    await harness.die(dead)
    await harness.queue.batches.cancel(*BATCH)
    closed = await harness.closed(*(f"of-{claim.run}" for claim in (given_back, later, working, dead)))
    assert closed == [True, True, False, True]


async def test_every_session_in_the_log_of_a_run_is_closed(harness: SessionsHarness) -> None:
    await harness.submit(2)
    first, other = await harness.queue.claim(2)
    names = [f"s{number}" for number in range(32)]
    await harness.open(first, *names)
    await harness.open(other, "other")
    assert (
        await close_left_sessions(harness.client, "d", KEY, "acme", [first.run, other.run, "never-begun"])
        == len(names) + 1
    )
    assert await harness.closed(*names, "other") == [True] * (len(names) + 1)


@pytest.mark.parametrize("reason", ["a log of a later release", "too many losses"])
async def test_run_that_cannot_continue_closes_its_session(harness: SessionsHarness, reason: str) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.open(claim, "s1")
    if reason == "too many losses":
        await harness.client.hset(run_key("d", "acme", claim.run), "losses", runner_module.MAX_LOSSES)
    else:
        later = KEY.seal(entry_purpose("acme", claim.run, 1, 2), '{"type": "of_another_release"}')
        await harness.client.rpush(run_log_key("d", "acme", claim.run), later)
    await harness.die(claim)
    async with harness.working(harness.runner(Worker())):
        await harness.until(BatchState.COMPLETED)
    assert await harness.closed("s1") == [True]


async def test_run_cancelled_at_its_start_closes_its_session(
    harness: SessionsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 0.2)
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.open(claim, "s1")
    await harness.die(claim)
    async with redis.asyncio.Redis(port=1) as nowhere:
        runner = harness.runner(Worker())
        # The log is the only record in Redis that cannot be read.
        runner.client = nowhere
        async with harness.working(runner):
            await until(lambda: runner.running)
            await harness.queue.batches.cancel(*BATCH)
            await harness.until(BatchState.CANCELLED)
    assert await harness.closed("s1") == [True]
