"""Starts and ends of sandboxes that overlap: a start in progress, a failed removal, a sandboxd that ends or was
killed.
"""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from tests.fake_engine import FakeGuest, echoing
from tests.fake_sandboxd import PLAN, open_host, running_sandboxd
from tests.sandboxd_calls import SOON_S
from tests.unit.test_sandboxd_sessions import lose, open_sessions
from workers.sandbox_client import SandboxClient
from workers.sandboxd.daemon import cancelled_by_signals
from workers.sandboxd.session import Session
from workers.sandboxd.sessions import NewSession
from workers.unix_listening import socket_mode


def container_of(entry: Session) -> str:
    assert entry.sandbox is not None
    return entry.sandbox.container


async def stillborn(guest: FakeGuest) -> None:
    guest.die()


# Removals that failed


async def test_the_container_of_a_lost_sandbox_that_would_not_go_is_swept(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        sessions, engine = host.sessions, host.engine
        await sessions.open("s", NewSession(PLAN, 60))
        engine.refuse_removals = 3
        await lose(sessions)
        for _ in range(3):
            await host.monitor.expire()
        assert host.alive == []
        assert sessions.find("s") is not None


async def test_remains_of_a_failed_start_are_swept(tmp_path: Path) -> None:
    async with open_host(tmp_path, stillborn, echoing, limit=1) as host:
        sessions, engine = host.sessions, host.engine
        engine.refuse_removals = 2
        with pytest.raises(SandboxUnavailable, match="did not start"):
            await sessions.open("s", NewSession(PLAN, 60))
        with pytest.raises(SandboxUnavailable, match="already holds"):
            await sessions.open("s", NewSession(PLAN, 60))
        for _ in range(3):
            await host.monitor.expire()
        assert host.alive == []
        await sessions.open("s", NewSession(PLAN, 60))


async def test_a_session_that_failed_to_close_is_swept(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        sessions, engine = host.sessions, host.engine
        await sessions.open("s", NewSession(PLAN, 60))
        engine.refuse_removals = 2
        with pytest.raises(SandboxUnavailable):
            await sessions.close("s")
        with pytest.raises(ToolFailure) as refused:
            await sessions.use("s", "c")
        assert refused.value.code is ErrorCode.SESSION_NOT_FOUND
        for _ in range(3):
            await host.monitor.expire()
        assert host.alive == []


async def test_opening_a_session_that_could_not_be_closed_ends_the_old_one_first(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        old = await sessions.open("s", NewSession(PLAN, 60))
        engine.refuse_removals = 1
        with pytest.raises(SandboxUnavailable):
            await sessions.close("s")
        new = await sessions.open("s", NewSession(PLAN, 60))
        assert new is not old
        assert list(engine.alive) == [container_of(new)]


async def test_a_session_closed_twice_at_once_is_removed_once(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        await sessions.open("s", NewSession(PLAN, 60))
        assert await asyncio.gather(sessions.close("s"), sessions.close("s")) == [True, True]
        assert len(engine.removed) == 1


# A start under way


async def test_closing_waits_for_a_start_under_way(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        engine.start_gate.clear()
        opening = asyncio.create_task(sessions.open("s", NewSession(PLAN, 60)))
        await engine.starting.wait()
        closing = asyncio.create_task(sessions.close("s"))
        await asyncio.sleep(0)
        engine.start_gate.set()
        await opening
        assert await closing is True
        assert engine.alive == {}


async def test_a_container_stays_known_when_its_client_leaves(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        engine.start_gate.clear()
        opening = asyncio.create_task(sessions.open("s", NewSession(PLAN, 60)))
        await engine.starting.wait()
        opening.cancel()
        engine.start_gate.set()
        entry = await sessions.open("s", NewSession(PLAN, 60))
        assert list(engine.alive) == [container_of(entry)]


async def test_a_sandboxd_that_ends_leaves_no_start_behind_and_makes_no_new_one(tmp_path: Path) -> None:
    async with open_sessions(tmp_path) as (sessions, engine):
        engine.start_gate.clear()
        opening = asyncio.create_task(sessions.open("s", NewSession(PLAN, 60)))
        await engine.starting.wait()
        ending = asyncio.create_task(sessions.close_all())
        await asyncio.sleep(0)
        engine.start_gate.set()
        await asyncio.gather(opening, ending)
        assert engine.alive == {}
        with pytest.raises(SandboxUnavailable, match="stopping"):
            await sessions.open("t", NewSession(PLAN, 60))


async def test_a_signal_ends_what_is_under_way_once_and_lets_it_clean_up() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        with cancelled_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(SOON_S)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
                cleaned.append("all")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert cleaned == ["all"]


# Connections and settings


async def test_a_kept_connection_with_an_answer_to_nothing_is_not_used_again(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        ours, theirs = socket.socketpair()
        client = SandboxClient(daemon.path)
        client._sock = ours
        theirs.send(b"an unrequested answer")
        assert (await asyncio.to_thread(client.status))["ok"] is True
        assert client._sock is not ours
        client.disconnect()
        theirs.close()


def test_the_socket_is_open_to_other_users_only_when_some_may_connect() -> None:
    own = os.geteuid()
    assert socket_mode({own}) == 0o600
    assert socket_mode({own, own + 1}) == 0o666
