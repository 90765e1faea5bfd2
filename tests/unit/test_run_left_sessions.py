"""Sessions of runs that end without execution: closed permanently, whichever process opened them."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from contract.names import place_key
from contract.run_events import ModelReplied, SessionOpened, SessionOpening
from orchestrator.runs import runner as runner_module
from store.batches import BatchState
from store.run_log import RunLog, close_left_sessions, entry_purpose, run_key, run_log_key
from store.runs import RunClaim
from store.sessions import SessionStore
from tests.builders import KEY
from tests.conftest import RedisProcess
from tests.runner_harness import BATCH, RunnerHarness, Worker
from tests.waiting import until


class Harness(RunnerHarness):
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
        keys = [place_key("d", "acme", session) for session in sessions]
        return [await self.client.hget(key, "state") == b"closed" for key in keys]


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield Harness(client)


async def test_a_cancelled_queued_run_keeps_no_sandbox(harness: Harness) -> None:
    await harness.submit(3)
    held, later, working = await harness.queue.claim(3)
    for claim in (held, later, working):
        await harness.open(claim, f"of-{claim.run}")
    await harness.queue.give_back(held)
    await harness.queue.give_back(later, after_s=1000.0)
    await harness.queue.cancel(*BATCH)
    assert await harness.closed("of-b-1", "of-b-2", "of-b-3") == [True, True, False]


async def test_a_cancelled_run_of_a_dead_process_keeps_no_sandbox(harness: Harness) -> None:
    await harness.submit(1)
    (claim,) = await harness.queue.claim(1)
    await harness.open(claim, "s1")
    await harness.die(claim)
    await harness.queue.cancel(*BATCH)
    assert await harness.closed("s1") == [True]


async def test_all_of_a_runs_sessions_are_closed_however_often_its_opening_was_begun(harness: Harness) -> None:
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
async def test_a_run_that_cannot_go_on_keeps_no_sandbox(harness: Harness, reason: str) -> None:
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


async def test_a_run_cancelled_at_its_start_has_no_sandbox(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
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
            await harness.queue.cancel(*BATCH)
            await harness.until(BatchState.CANCELLED)
    assert await harness.closed("s1") == [True]
