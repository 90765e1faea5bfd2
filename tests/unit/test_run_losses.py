"""Runs whose holders die. A run that kills each of its holders ends, and runs that were only in the same process do
not end with it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from contract.run_events import FailureKind, ModelReplied, RunEvent, SessionOpening
from orchestrator.runs import runner as runner_module
from orchestrator.runs.journal import Journal
from orchestrator.runs.outcomes import ORCHESTRATOR_LOST
from orchestrator.runs.runner import DOUBTFUL_LOSSES, MAX_LOSSES
from store.batches import BatchState, ItemOutcome
from store.run_log import LogEntry, RunAttempt, RunLog
from store.runs import RunClaim
from tests.builders import KEY
from tests.conftest import RedisProcess
from tests.runner_ground import BATCH, House, Worker, outcome_of


@pytest.fixture
async def house(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.02)
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield House(client)


async def claimed_and_lost(house: House, times: int) -> list[RunClaim]:
    """Return the run as claimed after the given number of processes died with it."""
    claims = await house.queue.claim(9)
    for _ in range(times):
        for claim in claims:
            await house.die(claim)
        claims = await house.queue.claim(9)
    return claims


async def losses(house: House, run: str = "b-1") -> int:
    (record,) = await house.queue.runs([("acme", run)])
    assert record is not None
    return record.losses


async def test_a_run_that_kills_its_processes_ends_as_an_infrastructure_failure(house: House) -> None:
    await house.submit(2)
    for claim in await claimed_and_lost(house, MAX_LOSSES - 1):
        if claim.run == "b-1":
            await house.die(claim)
        else:
            await house.queue.finish(claim, outcome_of(claim))
    worker = Worker()
    async with house.working(house.runner(worker)):
        await house.until(BatchState.COMPLETED)
    assert worker.begun == []
    (record,) = await house.queue.runs([("acme", "b-1")])
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.failure is not None
    failure = record.outcome.failure
    assert failure.kind == FailureKind.INFRASTRUCTURE
    assert failure.code == ORCHESTRATOR_LOST
    assert "5 times in a row" in failure.message
    assert await house.queue.retry(*BATCH, [FailureKind.INFRASTRUCTURE]) == 1
    assert await losses(house) == 0


@pytest.mark.parametrize(
    ("event", "left"),
    [(ModelReplied(run="b-1", at=1.0, chunks=()), 0), (SessionOpening(run="b-1", at=1.0, session="s"), 2)],
    ids=["a reply", "a session that is about to be opened"],
)
async def test_a_run_that_comes_further_starts_counting_again(house: House, event: RunEvent, left: int) -> None:
    await house.submit(1)
    (claim,) = await claimed_and_lost(house, 2)
    assert (claim.record.losses, await losses(house)) == (2, 2)
    run_log = await RunLog.load(house.client, "d", KEY, RunAttempt("acme", "b-1", claim.record.attempt, claim.token))
    await run_log.append(LogEntry(event))
    assert (await losses(house), run_log.has_grown) == (left, left == 0)


async def test_a_loss_in_a_batch_of_a_client_is_counted(house: House) -> None:
    await house.submit(1, is_detached=False)
    (claim,) = await house.queue.claim(1, BATCH)
    await house.die(claim)
    assert await house.other.claim(9) == []
    (again,) = await house.queue.claim(1, BATCH)
    assert again.record.losses == 1


async def test_a_run_put_back_is_not_lost(house: House) -> None:
    await house.submit(1)
    (claim,) = await house.queue.claim(1)
    await house.queue.give_back(claim)
    (again,) = await house.queue.claim(1)
    assert again.record.losses == 0


async def test_those_that_may_be_what_kills_are_tried_one_after_the_other_and_others_beside_them(house: House) -> None:
    await house.submit(3)
    for claim in await claimed_and_lost(house, DOUBTFUL_LOSSES - 1):
        await house.die(claim)
    running: set[str] = set()
    together: list[set[str]] = []

    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        running.add(claim.run)
        together.append(set(running))
        await worker.may_end.wait()
        running.discard(claim.run)
        return outcome_of(claim)

    worker = Worker(work)
    async with house.working(house.runner(worker)):
        await worker.has_begun.wait()
        # The two other runs are already back in the queue, to be claimed later.
        while await house.client.zcard("toolcrew:d:runs:delayed") < 2:  # noqa: ASYNC110
            # Redis has no event of ours for it
            await asyncio.sleep(0.01)
        worker.may_end.set()
        await house.until(BatchState.COMPLETED)
    assert sorted(len(some) for some in together) == [1, 1, 1]


async def test_a_doubtful_run_with_progress_lets_the_next_start(house: House) -> None:
    await house.submit(2)
    for claim in await claimed_and_lost(house, DOUBTFUL_LOSSES - 1):
        await house.die(claim)
    both: set[str] = set()

    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        both.add(claim.run)
        await journal.note_reply([])
        if len(both) == 2:
            worker.may_end.set()
        await worker.may_end.wait()
        return outcome_of(claim)

    worker = Worker(work)
    async with house.working(house.runner(worker)):
        await house.until(BatchState.COMPLETED)
    assert both == {"b-1", "b-2"}


async def test_a_manual_retry_resets_the_automatic_retries(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_AFTER_S", (0.001,))

    async def work(claim: RunClaim, journal: Journal, tell: Any) -> ItemOutcome:
        return outcome_of(claim, FailureKind.INFRASTRUCTURE)

    await house.submit(1)
    worker = Worker(work)
    async with house.working(house.runner(worker)):
        await house.until(BatchState.COMPLETED)
        assert await house.queue.retry(*BATCH, [FailureKind.INFRASTRUCTURE]) == 1
        await house.until(BatchState.COMPLETED)
    assert [attempt for _, attempt in worker.begun] == [1, 2, 3, 4, 5, 6]
