"""A runner whose runs wait for people: newly claimed runs and resumed runs share its slots."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from contract.run_events import RunEvent
from orchestrator.runs.journal import Journal
from store.batches import BatchState, ItemOutcome
from store.runs import RunClaim, RunQueue
from tests.builders import KEY
from tests.conftest import RedisProcess
from tests.runner_harness import RunnerHarness, Worker, open_harness, outcome_of
from tests.slot_harness import given_up


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerHarness]:
    async with open_harness(redis_server, monkeypatch) as made:
        yield made


class SlowQueue(RunQueue):
    """Answers claims when the test allows it."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        super().__init__(client, "d", KEY)
        self.claiming, self.may_claim = asyncio.Event(), asyncio.Event()
        self.may_claim.set()

    async def claim(self, most: int, *arguments: Any) -> list[RunClaim]:
        if not self.may_claim.is_set():
            self.claiming.set()
            await self.may_claim.wait()
        return await super().claim(most, *arguments)


class Story:
    """The first run's only call waits for an answer, and no claim is answered from then on until the test allows it.
    The other run works until the test ends it.
    """

    def __init__(self, queue: SlowQueue) -> None:
        self.queue, self.worker = queue, Worker(self._work)
        self.answered, self.is_back, self.has_begun, self.may_end = (asyncio.Event() for _ in range(4))

    async def _work(self, claim: RunClaim, journal: Journal, tell: Callable[[RunEvent], None]) -> ItemOutcome:
        async with self.worker.slots.run() as slot:
            if claim.run == "b-1":
                self.queue.may_claim.clear()
                async with slot.call("call"), given_up(slot, "call"):
                    await self.answered.wait()
                self.is_back.set()
            else:
                self.has_begun.set()
                await self.may_end.wait()
        return outcome_of(claim)


async def test_a_run_whose_slot_was_claimed_waits_for_the_next_slot(harness: RunnerHarness) -> None:
    await harness.submit(2)
    story = Story(queue := SlowQueue(harness.client))
    async with harness.working(harness.runner(story.worker, queue, concurrency=1)):
        await queue.claiming.wait()
        story.answered.set()
        await turns()
        assert not story.is_back.is_set(), "the slot may be another one's by now"
        queue.may_claim.set()
        await story.has_begun.wait()
        await turns()
        assert not story.is_back.is_set(), "the slot is another one's"
        story.may_end.set()
        await story.is_back.wait()
        await harness.until(BatchState.COMPLETED)


async def test_a_run_that_is_answered_while_nothing_is_found_to_claim_is_back_afterwards(
    harness: RunnerHarness,
) -> None:
    await harness.submit(1)
    story = Story(queue := SlowQueue(harness.client))
    async with harness.working(harness.runner(story.worker, queue, concurrency=1)):
        await queue.claiming.wait()
        story.answered.set()
        queue.may_claim.set()
        await story.is_back.wait()
        await harness.until(BatchState.COMPLETED)


async def turns() -> None:
    """Let everything run that can continue without Redis."""
    for _ in range(20):
        await asyncio.sleep(0)
