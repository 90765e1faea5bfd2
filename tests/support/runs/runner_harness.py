"""A queue with runners. A function of the test decides the outcome of each item."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.run_harness import RunHarness
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.run_events import Failure, FailureKind, RunEnded, RunEvent
from toolcrew.orchestrator.runs import runner as runner_module
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.run_gate import RunGate
from toolcrew.orchestrator.runs.run_slots import RunSlots
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.store.batches import BatchDefaults, BatchState, ItemOutcome, parse_batch_event
from toolcrew.store.run_queue import RunClaim, RunQueue

BATCH = ("acme", "b")
Work = Callable[[RunClaim, Journal, Callable[[RunEvent], None]], Awaitable[ItemOutcome]]


def outcome_of(claim: RunClaim, kind: FailureKind | None = None, body: dict[str, Any] | None = None) -> ItemOutcome:
    failure = Failure(kind=kind, code="CODE", message="no") if kind is not None else None
    attempt = claim.record.attempt
    return ItemOutcome(
        custom_id=claim.record.item.custom_id,
        run=claim.run,
        status_code=200,
        body=body,
        failure=failure,
        attempt=attempt,
    )


class Worker:
    """Replaces the execution of items: a function decides the outcome of each item. `begun`: run and attempt of each
    execution, in order.
    """

    def __init__(self, work: Work | None = None) -> None:
        self.gate = RunGate()
        self.slots = RunSlots()
        self.begun: list[tuple[str, int]] = []
        self.abandoned: list[str] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self._work = work

    async def work(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, tell: Callable[[RunEvent], None]
    ) -> ItemOutcome:
        self.begun.append((claim.run, claim.record.attempt))
        self.has_begun.set()
        if self._work is not None:
            return await self._work(claim, journal, tell)
        await self.may_end.wait()
        return outcome_of(claim)

    async def abandon(self, claim: RunClaim, journal: Journal) -> None:
        self.abandoned.append(claim.run)

    async def release_states(self, claim: RunClaim, journal: Journal) -> None:
        """Do nothing: no states are kept."""

    def forget(self, claim: RunClaim) -> None:
        """Do nothing: nothing is traced."""


class RunnerHarness(RunHarness):
    """A queue with its runners."""

    def runner(self, worker: Worker, queue: RunQueue | None = None, *, concurrency: int = 4) -> Runner:
        work: Any = worker
        return Runner(
            self.client, "d", queue or self.queue, work, RunEventPublisher(self.client, "d"), concurrency, BATCH
        )

    @asynccontextmanager
    async def working(self, *runners: Runner) -> AsyncIterator[list["asyncio.Task[None]"]]:
        """Run the runners within the block."""
        tasks = [asyncio.create_task(runner.run()) for runner in runners]
        try:
            async with asyncio.timeout(SOON_S):
                yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, state: BatchState) -> None:
        await wait_until_async(
            lambda: self.queue.batches.get(*BATCH),
            SOON_S,
            f"the batch is {state}",
            pause_s=0.01,
            accepts=lambda record: record.state is state,
        )

    async def batch_events(self) -> list[RunEvent]:
        events: Any = await self.client.xrange("toolcrew:d:t:acme:batch.b:events")
        return [parse_batch_event(fields[b"h"]) for _, fields in events]

    async def ends(self) -> list[RunEnded]:
        return [event for event in await self.batch_events() if isinstance(event, RunEnded)]


class WatchedQueue(RunQueue):
    """A queue that signals when runs have been renewed. The queue can fail a set number of times when an end is
    recorded.
    """

    def __init__(self, client: "redis.asyncio.Redis", outages: int = 0) -> None:
        super().__init__(client, "d", KEY)
        self.renewed = asyncio.Event()
        self.outages = outages
        self.noting = asyncio.Event()
        self.may_note = asyncio.Event()
        self.may_note.set()

    async def renew(self, claims: Any) -> Any:
        result = await super().renew(claims)
        self.renewed.set()
        return result

    async def finish(self, claim: RunClaim, outcome: ItemOutcome, *, calls: int = 0, seconds: float = 0.0) -> bool:
        self.noting.set()
        await self.may_note.wait()
        if self.outages:
            self.outages -= 1
            raise BrokerUnavailable("Redis is away")
        return await super().finish(claim, outcome, calls=calls, seconds=seconds)


@asynccontextmanager
async def open_harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunnerHarness]:
    """Yield a harness on that Redis whose runners use short intervals."""
    for name, hurried in (("CHECK_INTERVAL_S", 0.02), ("LEASE_S", 0.2), ("RETRY_AFTER_S", (0.001,))):
        monkeypatch.setattr(runner_module, name, hurried)
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield RunnerHarness(client)
