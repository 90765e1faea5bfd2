"""Sessions and their sandboxes: lost and rebuilt, full, idle, closed, and completely cleaned up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SandboxUnavailable
from tests.fake_engine import Behaviour, FakeEngine, FakeGuest, echoing
from tests.fake_sandboxd import PLAN, open_host, running_sandboxd
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


async def test_a_running_call_reports_the_loss(tmp_path: Path) -> None:
    async def dying(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        guest.die()

    async with running_sandboxd(tmp_path, dying, echoing) as daemon:
        client, name = await daemon.open()
        done = (await asyncio.to_thread(client.call, name, EXEC)).done
        assert done["error"]["code"] == "SANDBOX_UNAVAILABLE"
        again = (await asyncio.to_thread(client.call, name, EXEC)).done
        assert again["sandbox"] | {"id": ""} == {"id": "", "generation": 2, "rebuilt": True}


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


async def test_sandboxes_that_are_being_started_count(tmp_path: Path) -> None:
    async with open_sessions(tmp_path, limit=1) as (sessions, engine):
        engine.start_gate.clear()
        first = asyncio.create_task(sessions.open("a", NewSession(PLAN, 60)))
        await engine.starting.wait()
        with pytest.raises(SandboxUnavailable):
            await sessions.open("b", NewSession(PLAN, 60))
        engine.start_gate.set()
        await first


async def test_a_start_that_failed_frees_its_place(tmp_path: Path) -> None:
    async def stillborn(guest: FakeGuest) -> None:
        guest.die()

    async with open_sessions(tmp_path, stillborn, echoing, limit=1) as (sessions, _):
        with pytest.raises(SandboxUnavailable):
            await sessions.open("a", NewSession(PLAN, 60))
        await sessions.open("b", NewSession(PLAN, 60))
        assert len(sessions) == 1


async def test_a_session_opened_twice_at_once_has_one_sandbox(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        first, two = await asyncio.gather(
            sessions.open("s", NewSession(PLAN, 60)), sessions.open("s", NewSession(PLAN, 60))
        )
        assert first is two
        assert len(engine.alive) == 1


# Closing


async def test_closing_returns_when_the_container_is_gone(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        engine.remove_gate.clear()
        closing = asyncio.create_task(sessions.close("s"))
        await engine.removing.wait()
        assert not closing.done()
        engine.remove_gate.set()
        assert await closing is True


async def test_closing_ends_the_calls_that_run(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def busy(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        started.set()
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, busy) as daemon:
        client, name = await daemon.open()
        running = asyncio.create_task(asyncio.to_thread(client.call, name, EXEC))
        await started.wait()
        await asyncio.to_thread(daemon.client().close, name)
        assert (await running).done["error"]["code"] == "SANDBOX_UNAVAILABLE"


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


async def test_a_container_that_stays_does_not_block_others(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        for name in ("a", "b", "c"):
            await sessions.open(name, NewSession(PLAN, 60))
        engine.refuse_removals = 1
        await sessions.close_all()
        assert len(engine.alive) == 1
