"""Sessions whose files are stored outside the container: rebuilt around the files, given up, and taken over by the
next sandboxd.
"""

import asyncio
import os
from pathlib import Path

import pytest

from contract.errors import SandboxUnavailable
from tests.fake_sandboxd import (
    PLAN,
    FakeHost,
    KeptWorkspaces,
    MemorySuspensionStore,
    build_host,
    open_host,
    running_sandboxd,
)
from workers.sandboxd.monitor import DiskMonitor, IdleTimes, SessionMonitor
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.sessions import NewSession

EXEC = {"op": "exec", "argv": ["true"], "timeout_s": 5}
SOON_S = 10.0


async def lose(host: FakeHost, sandbox: Sandbox) -> None:
    """Kill the container while no call runs."""
    host.engine.removing.clear()
    host.engine.alive[sandbox.container].die()
    await asyncio.wait_for(host.engine.removing.wait(), SOON_S)


async def test_a_session_is_rebuilt_around_its_workspace_at_once_and_says_so_once(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=KeptWorkspaces()) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        assert entry.sandbox is not None
        await lose(host, entry.sandbox)
        same, sandbox = await host.sessions.use("acme:s")
        assert (same, sandbox.generation) == (entry, 2)
        description = entry.describe_sandbox(sandbox)
        assert (description["rebuilt"], "files in /workspace are kept" in description["news"]) == (True, True)
        assert "news" not in entry.describe_sandbox(sandbox)
        mounts = [guest.config["HostConfig"]["Mounts"][0]["Source"] for guest in host.engine.guests]
        assert mounts[0] == mounts[1]


async def test_a_session_that_cannot_be_packed_keeps_its_container(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=KeptWorkspaces()) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        host.suspension_store.refuse = 1
        assert not await host.sessions.suspender.give_up(entry, must_be_idle=False)
        assert (await host.sessions.use("acme:s"))[1] is entry.sandbox


async def test_a_session_with_a_background_job_is_neither_frozen_nor_given_up(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=KeptWorkspaces()) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        host.engine.guests[0].attests = {"jobs": 1}
        assert not await host.sessions.suspender.pause(entry)
        assert not await host.sessions.suspender.give_up(entry, must_be_idle=False)
        assert len(host.alive) == 1


async def test_a_frozen_session_is_thawed_by_its_next_call(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, workspaces=KeptWorkspaces()) as daemon:
        client, name = await daemon.open()
        entry = daemon.sessions.find(name)
        assert entry is not None
        assert await daemon.sessions.suspender.pause(entry)
        assert daemon.engine.paused == set(daemon.host.alive)
        assert "error" not in (await asyncio.to_thread(client.call, name, EXEC)).done
        assert daemon.engine.paused == set()


async def test_a_call_that_comes_while_a_session_is_given_up_waits_and_runs(tmp_path: Path) -> None:
    packing, go_on = asyncio.Event(), asyncio.Event()

    class SlowSuspensionStore(MemorySuspensionStore):
        async def pack(self, session: object, sandbox: Sandbox) -> str:
            packing.set()
            await go_on.wait()
            return await super().pack(session, sandbox)  # type: ignore[arg-type]

    async with open_host(tmp_path, workspaces=KeptWorkspaces(), suspension_store=SlowSuspensionStore()) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        giving_up = asyncio.create_task(host.sessions.suspender.give_up(entry, must_be_idle=False))
        await packing.wait()
        using = asyncio.create_task(host.sessions.use("acme:s"))
        go_on.set()
        assert await giving_up
        assert (await using)[1].generation == 2


async def test_a_full_host_takes_the_container_of_the_session_that_was_idle_longest(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=KeptWorkspaces(), limit=2) as host:
        old, new = (
            await host.sessions.open("acme:old", NewSession(PLAN, 60)),
            await host.sessions.open("acme:new", NewSession(PLAN, 60)),
        )
        old.used_at -= 100
        new.used_at -= 50
        await host.sessions.open("acme:third", NewSession(PLAN, 60))
        assert (old.sandbox, new.sandbox is not None, len(host.alive)) == (None, True, 2)


async def test_five_hundred_sessions_live_in_a_few_containers(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=KeptWorkspaces(), limit=5) as host:
        for number in range(60):
            (await host.sessions.open(f"acme:{number}", NewSession(PLAN, 60))).used_at -= 10
        for number in range(60):
            entry, sandbox = await host.sessions.use(f"acme:{number}")
            assert sandbox.lost is None
            entry.used_at -= 10
        assert (len(host.alive), len(host.sessions)) == (5, 60)


async def test_a_kept_session_whose_workspace_is_missing_is_not_taken_over(tmp_path: Path) -> None:
    first = build_host(tmp_path, workspaces=KeptWorkspaces())
    await first.sessions.open("acme:s", NewSession(PLAN, 60))
    first.lease.give_back()
    async with open_host(tmp_path, workspaces=KeptWorkspaces()) as second:
        assert second.sessions.adopt() == 0
        assert second.records.sessions() == []
    await first.engine.end()


async def test_closing_deletes_the_workspace_the_archive_and_the_record(tmp_path: Path) -> None:
    workspaces = KeptWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        await host.sessions.suspender.give_up(entry, must_be_idle=False)
        await host.sessions.close("acme:s")
        assert (workspaces.alive, host.suspension_store.archives, host.records.sessions()) == ({}, {}, [])


async def test_a_workspace_that_would_not_go_is_tried_again(tmp_path: Path) -> None:
    workspaces = KeptWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces) as host:
        await host.sessions.open("acme:s", NewSession(PLAN, 60))
        workspaces.refuse_removals = 1
        await host.sessions.close("acme:s")
        assert len(workspaces.alive) == 1
        await host.monitor.expire()
        assert workspaces.alive == {}


async def test_a_failed_start_leaves_neither_workspace_nor_place_nor_record(tmp_path: Path) -> None:
    workspaces = KeptWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces, limit=1) as host:
        host.engine.refuse_starts = 1
        with pytest.raises(SandboxUnavailable):
            await host.sessions.open("acme:s", NewSession(PLAN, 60))
        assert (workspaces.alive, host.factory.slots.taken, host.records.containers()) == ({}, 0, [])


async def test_an_overfull_workspace_ends_its_sandbox_once_and_leaves_room_to_delete(tmp_path: Path) -> None:
    workspaces = KeptWorkspaces(is_hard=False)
    async with open_host(tmp_path, workspaces=workspaces) as host:
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        workspaces.overfull = {entry.workspace.name: 2 * PLAN.workspace_bytes}
        await host.monitor.end_overfull()
        assert entry.sandbox is not None
        assert "delete files" in str(entry.sandbox.lost)
        _, sandbox = await host.sessions.use("acme:s")
        await host.monitor.end_overfull()
        assert sandbox.lost is None
        workspaces.overfull = {entry.workspace.name: 3 * PLAN.workspace_bytes}
        await host.monitor.end_overfull()
        assert sandbox.lost is not None


async def test_a_nearly_full_disk_stops_sessions_that_write(tmp_path: Path) -> None:
    class Disk(DiskMonitor):
        words: str | None = "the disk has only 5 bytes free: make room"

        def find_shortage(self) -> str | None:
            return self.words

    async with open_host(tmp_path, workspaces=KeptWorkspaces()) as host:
        disk = Disk(tmp_path, 0)
        monitor = SessionMonitor(host.sessions, host.factory, host.reaper, IdleTimes(60, 60), disk)
        entry = await host.sessions.open("acme:s", NewSession(PLAN, 60))
        await monitor.watch_disk()
        assert entry.sandbox is not None
        assert "make room" in str(entry.sandbox.lost)
        with pytest.raises(SandboxUnavailable, match="make room"):
            await host.sessions.use("acme:s")
        disk.words = None
        await monitor.watch_disk()
        assert (await host.sessions.use("acme:s"))[1].lost is None


def test_a_disk_is_short_below_its_floor_and_until_a_quarter_more_is_free(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert DiskMonitor(tmp_path, free // 2).find_shortage() is None
    watch = DiskMonitor(tmp_path, free * 2)
    assert "make room" in str(watch.find_shortage())
    watch._stop_bytes = int(free * 0.9)
    assert watch.find_shortage() is not None
    watch._stop_bytes = free // 2
    assert watch.find_shortage() is None
