"""Sessions of runs that end without execution: closed permanently, whichever process opened them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from contract.names import place_key
from contract.run_events import ModelReplied, SessionOpened, SessionOpening
from orchestrator.runs import runner as runner_module
from store import run_log
from store.batches import BatchState
from store.run_log import LogEntry, RunLog, close_left_sessions, entry_purpose, run_key, run_log_key
from store.runs import RunClaim
from store.sessions import SessionStore
from tests.builders import KEY
from tests.conftest import RedisProcess
from tests.runner_ground import BATCH, House, Worker


class Ground(House):
    """Runs that have sessions."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        super().__init__(client)
        self.places = SessionStore(client, "d")

    async def open(self, claim: RunClaim, *sessions: str) -> None:
        """Open the sessions as a process does that dies while it opens each session but the last."""
        run_log = await RunLog.load(self.client, "d", KEY, claim.attempt)
        for session in sessions:
            await run_log.append(LogEntry(SessionOpening(run=claim.run, at=1.0, session=session)))
            await self.places.open(claim.tenant, session, "host.a.b1", start="{}", ttl_s=60.0, limit=100)
        await run_log.append(LogEntry(SessionOpened(run=claim.run, at=1.0, session=sessions[-1], info={})))
        await run_log.append(LogEntry(ModelReplied(run=claim.run, at=1.0, chunks=({"choices": []},))))

    async def closed(self, *sessions: str) -> list[bool]:
        keys = [place_key("d", "acme", session) for session in sessions]
        return [await self.client.hget(key, "state") == b"closed" for key in keys]


@pytest.fixture
async def ground(redis_server: RedisProcess) -> AsyncIterator[Ground]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        with capture_logs():
            yield Ground(client)


async def test_a_cancelled_queued_run_keeps_no_sandbox(ground: Ground) -> None:
    await ground.submit(3)
    held, later, working = await ground.queue.claim(3)
    for claim in (held, later, working):
        await ground.open(claim, f"of-{claim.run}")
    await ground.queue.give_back(held)
    await ground.queue.give_back(later, after_s=1000.0)
    await ground.queue.cancel(*BATCH)
    assert await ground.closed("of-b-1", "of-b-2", "of-b-3") == [True, True, False]


async def test_a_cancelled_run_of_a_dead_process_keeps_no_sandbox(ground: Ground) -> None:
    await ground.submit(1)
    (claim,) = await ground.queue.claim(1)
    await ground.open(claim, "s1")
    await ground.die(claim)
    await ground.queue.cancel(*BATCH)
    assert await ground.closed("s1") == [True]


async def test_all_of_a_runs_sessions_are_closed_however_often_its_opening_was_begun(ground: Ground) -> None:
    await ground.submit(2)
    first, other = await ground.queue.claim(2)
    names = [f"s{number}" for number in range(2 * run_log.PAGE)]
    await ground.open(first, *names)
    await ground.open(other, "other")
    assert (
        await close_left_sessions(ground.client, "d", KEY, "acme", [first.run, other.run, "never-begun"])
        == len(names) + 1
    )
    assert await ground.closed(*names, "other") == [True] * (len(names) + 1)


@pytest.mark.parametrize("reason", ["a log of a later release", "too many losses"])
async def test_a_run_that_cannot_go_on_keeps_no_sandbox(ground: Ground, reason: str) -> None:
    await ground.submit(1)
    (claim,) = await ground.queue.claim(1)
    await ground.open(claim, "s1")
    if reason == "too many losses":
        await ground.client.hset(run_key("d", "acme", claim.run), "losses", runner_module.MAX_LOSSES)
    else:
        later = KEY.seal(entry_purpose("acme", claim.run, 1, 2), '{"type": "of_another_release"}')
        await ground.client.rpush(run_log_key("d", "acme", claim.run), later)
    await ground.die(claim)
    async with ground.working(ground.runner(Worker())):
        await ground.until(BatchState.COMPLETED)
    assert await ground.closed("s1") == [True]


async def test_a_run_cancelled_at_its_start_has_no_sandbox(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LEASE_S", 0.2)
    await ground.submit(1)
    (claim,) = await ground.queue.claim(1)
    await ground.open(claim, "s1")
    await ground.die(claim)
    async with redis.asyncio.Redis(port=1) as nowhere:
        runner = ground.runner(Worker())
        # The log is the only record in Redis that cannot be read.
        runner.client = nowhere
        async with ground.working(runner):
            while not runner.running:  # noqa: ASYNC110  # it has no event of ours
                await asyncio.sleep(0.01)
            await ground.queue.cancel(*BATCH)
            await ground.until(BatchState.CANCELLED)
    assert await ground.closed("s1") == [True]
