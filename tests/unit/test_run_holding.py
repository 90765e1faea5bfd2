"""Runs that must wait return to the queue unchanged, and followers learn the reason. A model that refuses the process
ends the process's work.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from contract.errors import ModelDenied
from contract.run_events import BatchNotice, RunEvent, RunRetried, SessionOpening
from orchestrator.runs import run_gate as gate_module
from orchestrator.runs import runner as runner_module
from orchestrator.runs.event_publisher import RunEventPublisher
from orchestrator.runs.journal import Journal
from orchestrator.runs.run_gate import RunDeferred, RunGate
from orchestrator.runs.run_slots import RunSlots
from orchestrator.runs.runner import Runner
from store.batches import BatchDefaults, BatchState, ItemOutcome, parse_batch_event
from store.runs import RunClaim
from tests.conftest import RedisProcess
from tests.run_harness import RunHarness, build_outcome

SOON_S = 30.0
BATCH = ("acme", "b")


class Troubled:
    """Replaces the work on items: raises these errors in order, and then every item succeeds."""

    def __init__(self, *troubles: Exception) -> None:
        self.gate, self.slots = RunGate(), RunSlots()
        self.begun: list[tuple[str, int, bool]] = []
        self.abandoned: list[str] = []
        self._troubles = list(troubles)

    async def work(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, tell: Callable[[RunEvent], None]
    ) -> ItemOutcome:
        self.begun.append((claim.run, claim.record.attempt, claim.is_resumed))
        if not journal.is_resumed:
            await journal.note(SessionOpening, session="s")
        if self._troubles:
            raise self._troubles.pop(0)
        self.gate.note_answer(claim.run)
        return build_outcome(claim)

    async def abandon(self, claim: RunClaim, journal: Journal) -> None:
        self.abandoned.append(claim.run)

    async def release_states(self, claim: RunClaim, journal: Journal) -> None:
        """Do nothing: no states are kept."""

    def drop_spans(self, claim: RunClaim) -> None:
        """Trace nothing."""


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunHarness]:
    for module, name in ((runner_module, "LOOK_S"), (runner_module, "QUOTA_RETRY_S"), (gate_module, "QUOTA_RETRY_S")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(gate_module, "PAUSES_S", (0.01,))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushdb()
    try:
        yield RunHarness(client)
    finally:
        await client.aclose()


async def work(harness: RunHarness, troubled: Troubled, *, only: tuple[str, str] | None = BATCH) -> None:
    """Run until the batch is done. Raises the runner's exceptions."""
    stand_in: Any = troubled
    runner = Runner(harness.client, "d", harness.queue, stand_in, RunEventPublisher(harness.client, "d"), 4, only)
    running = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(SOON_S):
            # Redis has no event of ours for it.
            while not running.done() and (await harness.queue.batch(*BATCH)).state is not BatchState.COMPLETED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        runner.drain()
        await running


async def read_run_events(harness: RunHarness) -> list[RunEvent]:
    entries: Any = await harness.client.xrange("toolcrew:d:t:acme:batch.b:events")
    return [parse_batch_event(fields[b"h"]) for _, fields in entries]


async def notes(harness: RunHarness) -> list[str]:
    return [event.message for event in await read_run_events(harness) if isinstance(event, BatchNotice)]


@pytest.mark.parametrize("cause", ["endpoint", "request", "quota"])
async def test_a_waiting_run_continues_in_the_same_attempt(harness: RunHarness, cause: Any) -> None:
    await harness.submit(1)
    troubled = Troubled(RunDeferred("down", cause), RunDeferred("down", cause))
    await work(harness, troubled)
    assert troubled.begun == [("b-1", 1, False), ("b-1", 1, True), ("b-1", 1, True)]
    assert (await harness.queue.batch(*BATCH)).succeeded == 1
    assert not any(isinstance(event, RunRetried) for event in await read_run_events(harness))


async def test_a_watcher_sees_the_start_and_end_of_a_wait_once(harness: RunHarness) -> None:
    await harness.submit(3, concurrency=1)
    troubled = Troubled(*[RunDeferred("it is down", "endpoint")] * 3, *[RunDeferred("full", "quota")] * 2)
    troubled.gate.has_answered_since(troubled.gate.now())
    await work(harness, troubled)
    messages = await notes(harness)
    assert sum("full" in note for note in messages) == 1
    assert (
        sum("the batch waits for its model" in note for note in messages)
        == sum("answers again" in note for note in messages)
        >= 1
    )


async def test_a_model_that_refuses_the_process_ends_its_work_and_fails_no_item(harness: RunHarness) -> None:
    await harness.submit(8)
    troubled = Troubled(*[ModelDenied("check the key")] * 8)
    with pytest.raises(ModelDenied, match="check the key"):
        await work(harness, troubled)
    record = await harness.queue.batch(*BATCH)
    assert (record.succeeded, sum(record.failed.values())) == (0, 0)
    assert await harness.queue.counts(*BATCH) == {"waiting": 8, "running": 0}
    assert len(troubled.begun) <= 4
