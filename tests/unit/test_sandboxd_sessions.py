"""Sessions and their sandboxes: lost and rebuilt, full, idle, closed, and completely cleaned up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SandboxUnavailable
from tests.fake_engine import Behaviour, FakeEngine, FakeGuest, echoing
from tests.fake_sandboxd import PLAN, open_host
from workers.sandboxd.sessions import NewSession, Sessions

EXEC = {"op": "exec", "argv": ["true"], "timeout_s": 5}
SOON_S = 10.0


@asynccontextmanager
async def open_sessions(folder: Path, *behaviours: Behaviour, **how: Any) -> AsyncIterator[tuple[Sessions, FakeEngine]]:
    async with open_host(folder, *behaviours, **how) as host:
        yield host.sessions, host.engine


async def lose(sessions: Sessions, session: str = "s") -> None:
    """Kill the session's container, and wait until sandboxd has detected the loss."""
    entry = sessions.find(session)
    assert entry is not None
    sandbox = entry.sandbox
    assert sandbox is not None
    noticing = sandbox.begin("", EXEC, 0, lambda _: None)
    sandbox.runtime._engine.alive[sandbox.container].die()  # type: ignore[attr-defined]
    await asyncio.wait_for(noticing.done, SOON_S)


# Loss


async def test_every_loss_is_reported_once_and_the_next_use_gets_a_fresh_sandbox(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        for generation in (2, 3):
            await lose(sessions)
            with pytest.raises(SandboxUnavailable, match="files are lost"):
                await sessions.use("s", "c")
            assert (await sessions.use("s", "c"))[1].generation == generation
            assert len(engine.alive) == 1


async def test_calls_that_come_at_once_after_a_loss_rebuild_it_once(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        await lose(sessions)
        with pytest.raises(SandboxUnavailable):
            await sessions.use("s", "c")
        entries = await asyncio.gather(*(sessions.use("s", "c") for _ in range(5)))
        assert {sandbox.generation for _, sandbox in entries} == {2}
        assert len(engine.guests) == 2


async def test_a_session_whose_rebuilding_failed_tries_again(tmp_path: Path) -> None:
    async def stillborn(guest: FakeGuest) -> None:
        guest.die()

    async with open_sessions(tmp_path, echoing, stillborn, echoing) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        await lose(sessions)
        for _ in range(2):
            with pytest.raises(SandboxUnavailable):
                await sessions.use("s", "c")
        assert (await sessions.use("s", "c"))[1].generation == 2
        assert len(engine.alive) == 1


async def test_a_removal_that_failed_is_tried_again(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        engine.refuse_removals = 2
        await lose(sessions)
        with pytest.raises(SandboxUnavailable, match="files are lost"):
            await sessions.use("s", "c")
        with pytest.raises(SandboxUnavailable, match="device busy"):
            await sessions.use("s", "c")
        assert (await sessions.use("s", "c"))[1].generation == 2


# Opening


async def test_a_full_host_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    async with open_sessions(tmp_path, limit=1) as (sessions, engine):
        await sessions.open("a", NewSession(PLAN, 60))
        with pytest.raises(SandboxUnavailable, match="TOOLCREW_MAX_SANDBOXES"):
            await sessions.open("b", NewSession(PLAN, 60))
        await sessions.close("a")
        await sessions.open("b", NewSession(PLAN, 60))
        assert len(engine.alive) == 1


# Closing


async def test_a_container_that_could_not_be_removed_is_not_forgotten(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        engine.refuse_removals = 1
        with pytest.raises(SandboxUnavailable):
            await sessions.close("s")
        await sessions.close("s")
        assert engine.alive == {}


async def test_a_session_closed_while_it_is_rebuilt_leaves_nothing(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        await lose(sessions)
        with pytest.raises(SandboxUnavailable):
            await sessions.use("s", "c")
        engine.starting.clear()
        engine.start_gate.clear()
        rebuilding = asyncio.create_task(sessions.use("s", "c"))
        await engine.starting.wait()
        closing = asyncio.create_task(sessions.close("s"))
        engine.start_gate.set()
        await asyncio.gather(rebuilding, closing, return_exceptions=True)
        assert engine.alive == {}
