"""The reaper removes what has no owner and keeps what has one: sweeps, leases, records, and idle sessions."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SandboxUnavailable
from tests.fake_sandboxd import PLAN, KeptWorkspaces, listed, open_host, sandbox_of
from workers.sandboxd.leases import Lease
from workers.sandboxd.monitor import IdleTimes
from workers.sandboxd.records import Records
from workers.sandboxd.sessions import NewSession


def hold_lease(folder: Path, name: str, sender: Any, go: Any) -> None:
    sender.send(Lease.take(folder, name).label)
    go.recv()
    os._exit(9)


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Start another process that holds a lease. Return its label, a function that kills it, and the process."""
    context = multiprocessing.get_context("spawn")
    hears, sender = context.Pipe()
    goes, go = context.Pipe()
    process = context.Process(target=hold_lease, args=(tmp_path / "leases", "neighbour", sender, goes), daemon=True)
    process.start()
    yield hears.recv(), go, process
    process.kill()
    process.join()


async def test_containers_of_a_predecessor_past_their_deadline_or_never_started_are_removed(tmp_path: Path) -> None:
    now = time.time()
    async with open_host(tmp_path) as host:
        host.engine.listed = [
            listed("predecessor", sandboxd="test"),
            listed("another", sandboxd="another"),
            listed("other deployment", sandboxd="test", deployment="other", labels={"toolcrew.deadline": "1"}),
            *(listed(f"deadline {shift}", labels={"toolcrew.deadline": str(int(now) + shift)}) for shift in (-61, -30)),
            *(listed(f"created {age}", state="created", created_at=now - age) for age in (10, 1000)),
        ]
        assert await host.reaper.sweep() == 3
        names = [container.name for container in host.engine.listed]
        assert names == ["another", "other deployment", "deadline -30", "created 10"]


async def test_containers_of_this_sandboxd_stay(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        host.engine.listed = [listed(sandbox_of(entry).name, sandboxd="test", labels={"toolcrew.deadline": "1"})]
        assert await host.reaper.sweep() == 0


@pytest.mark.parametrize("deadline", ["", "soon", "-1", "²", "1e3"])
async def test_a_deadline_that_reports_nothing_never_passes(tmp_path: Path, deadline: str) -> None:
    async with open_host(tmp_path) as host:
        host.engine.listed = [listed("a", labels={"toolcrew.deadline": deadline})]
        assert await host.reaper.sweep() == 0


async def test_only_the_data_of_a_dead_sandboxd_is_removed(tmp_path: Path, neighbour: tuple[str, Any, Any]) -> None:
    label, go, process = neighbour
    async with open_host(tmp_path) as host:
        host.engine.listed = [listed("a", lease=label)]
        assert await host.reaper.sweep() == 0
        go.send("end")
        process.join()
        assert await host.reaper.sweep() == 1
        assert not [*(tmp_path / "leases").glob("neighbour*")]
        with pytest.raises(SandboxUnavailable, match="lives on this host"):
            Lease.take(tmp_path / "leases", "test")


@pytest.mark.parametrize("label", ["", "x", "elsewhere/1.lease", "a/b/../../etc/passwd", "/gone.lease"])
async def test_a_lease_of_another_place_is_not_judged(tmp_path: Path, label: str) -> None:
    async with open_host(tmp_path) as host:
        assert not host.lease.is_dead(label)


async def test_a_second_sandboxd_of_the_name_is_refused_and_the_name_is_free_again_afterwards(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path, "one")
    with pytest.raises(SandboxUnavailable, match="TOOLCREW_SANDBOXD_NAME"):
        Lease.take(tmp_path, "one")
    other = Lease.take(tmp_path, "two")
    lease.give_back()
    Lease.take(tmp_path, "one").give_back()
    other.give_back()


async def test_a_container_is_recorded_before_it_starts_and_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        host.engine.start_gate.clear()

        opening = asyncio.create_task(host.sessions.open("acme:s", NewSession(PLAN, 60)))
        await host.engine.starting.wait()
        assert len(host.records.containers()) == 1
        host.engine.start_gate.set()
        await opening
        host.engine.refuse_removals = 1
        with pytest.raises(SandboxUnavailable):
            await host.sessions.close("acme:s")
        assert len(host.records.containers()) == 1
        await host.sessions.close("acme:s")
        assert host.records.containers() == []


async def test_records_of_removed_containers_are_deleted(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        host.records.add_container("gone", 0)
        host.records.add_container("there", 0)
        host.engine.listed = [listed("there", sandboxd="another")]
        await host.reaper.sweep()
        assert host.records.containers() == ["there"]


def test_a_record_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"id": 1}')):
        (tmp_path / "sessions" / f"{name}.json").write_text(text)
    assert records.sessions() == []
    assert len(list((tmp_path / "sessions").glob("*.bad"))) == 3


async def test_idle_sessions_are_frozen_then_given_up_and_working_ones_are_left(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=KeptWorkspaces(), idle=IdleTimes(pause_s=10, evict_s=100)) as host:
        fresh, idle, long = [
            await host.sessions.open(f"acme:{name}", NewSession(PLAN, 9999)) for name in ("fresh", "idle", "long")
        ]
        idle.used_at -= 20
        long.used_at -= 200
        await host.monitor.evict_idle()
        await host.monitor.freeze_idle()
        assert (fresh.is_ready, idle.is_paused, long.sandbox) == (True, True, None)


async def test_a_session_expires_after_its_time_also_when_its_container_is_given_up(tmp_path: Path) -> None:
    workspaces = KeptWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        await host.sessions.suspender.give_up(entry, must_be_idle=False)
        entry.used_at -= 61
        await host.monitor.expire()
        assert (len(host.sessions), workspaces.alive) == (0, {})


async def test_a_session_in_the_middle_of_a_call_does_not_expire(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        sandbox_of(entry).begin("c", {"op": "exec", "timeout_s": 5}, 0, lambda _: None)
        entry.used_at -= 61
        await host.monitor.expire()
        assert len(host.sessions) == 1


async def test_expiring_goes_on_when_one_container_would_not_go(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        for name in ("a", "b"):
            (await host.sessions.open(f"acme:{name}", NewSession(PLAN, 60))).used_at -= 61
        host.engine.refuse_removals = 1
        await host.monitor.expire()
        assert len(host.sessions) == 1
        await host.monitor.expire()
        assert len(host.sessions) == 0
