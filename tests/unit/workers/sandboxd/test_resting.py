"""Sessions that are frozen, packed, rebuilt or taken over during calls, cancels, ends, and full disks."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.sandboxd.fake_engine import FakeGuest, echoing
from tests.support.sandboxd.fake_sandboxd import (
    PLAN,
    FakeHost,
    MemorySuspensionStore,
    MemoryWorkspaces,
    Sandboxd,
    build_host,
    end_host,
    open_host,
    running_sandboxd,
)
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd import factory as factory_module
from toolcrew.workers.sandboxd.evictions import MAX_EVICTIONS
from toolcrew.workers.sandboxd.monitor import DiskMonitor, IdleTimes, SessionMonitor
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import SessionParameters

EXEC = {"op": "exec", "argv": ["true"], "timeout_s": 5}


class SlowSuspensionStore(MemorySuspensionStore):
    """A store that packs and unpacks when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def pack(self, session: HostSession, sandbox: Sandbox) -> str:
        await self._wait()
        return await super().pack(session, sandbox)

    async def unpack(self, session: HostSession, sandbox: Sandbox) -> None:
        await self._wait()
        await super().unpack(session, sandbox)

    async def _wait(self) -> None:
        self.begun.set()
        await self.go_on.wait()


async def give_up(host: FakeHost, name: str = "acme:s") -> HostSession:
    entry = await host.sessions.open(name, SessionParameters(PLAN, 60))
    assert await host.sessions.suspender.give_up(entry, must_be_idle=False)
    return entry


async def pack(daemon: Sandboxd, name: str, store: SlowSuspensionStore) -> HostSession:
    """Give the session up at once. Its unpacking waits for the test."""
    entry = daemon.session(name)
    store.go_on.set()
    await daemon.sessions.suspender.give_up(entry, must_be_idle=False)
    store.begun.clear()
    store.go_on.clear()
    return entry


async def end_process(host: FakeHost) -> None:
    """Replace the process. Its stored data remains."""
    host.lease.give_back()
    await host.engine.end()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[FakeHost]:
    async with open_host(tmp_path, workspaces=MemoryWorkspaces()) as opened:
        yield opened


@pytest.fixture
async def entry(host: FakeHost) -> HostSession:
    return await host.sessions.open("acme:s", SessionParameters(PLAN, 60))


# Maximum life


async def test_call_beyond_the_maximum_sandbox_life_gets_a_new_sandbox(host: FakeHost, entry: HostSession) -> None:
    """The sandboxes of the test live for 3,600 s."""
    _, first = await host.sessions.use("acme:s", "a", None, 600.0)
    assert first.remaining_s() == pytest.approx(3_540, abs=30)
    first.started_at -= 3_000.0
    assert (await host.sessions.use("acme:s", "b", None, 500.0))[1] is first
    running = first.begin("running", EXEC, 0, lambda _: None)
    assert (await host.sessions.use("acme:s", "c", None, 600.0))[1] is first
    first.forget(running)
    _, second = await host.sessions.use("acme:s", "d", None, 600.0)
    assert (second.generation, second.remaining_s() > 600, entry.news) == (2, True, None)
    assert host.suspension_store.unpacked
    assert host.alive == [second.container]


# Freezing


async def test_shutdown_during_a_freeze_still_packs_the_session(host: FakeHost, entry: HostSession) -> None:
    host.engine.pause_gate.clear()
    freezing = asyncio.create_task(host.sessions.suspender.pause(entry))
    await host.engine.pausing.wait()
    freezing.cancel()
    ending = asyncio.create_task(host.sessions.suspend_all(SOON_S))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not freezing.done()  # the engine is about to freeze it: to thaw it now would be too early
    host.engine.pause_gate.set()
    await ending
    assert (entry.archive is not None, host.engine.paused, host.alive) == (True, set(), [])


async def test_slow_pack_does_not_delay_the_freeze_of_others(tmp_path: Path) -> None:
    suspension_store = SlowSuspensionStore()
    async with open_host(
        tmp_path, workspaces=MemoryWorkspaces(), suspension_store=suspension_store, idle=IdleTimes(10, 100)
    ) as host:
        slow, idle = (
            await host.sessions.open("acme:slow", SessionParameters(PLAN, 9999)),
            await host.sessions.open("acme:idle", SessionParameters(PLAN, 9999)),
        )
        slow.used_at -= 200
        idle.used_at -= 20
        eviction = asyncio.create_task(host.monitor.evict_idle())
        await suspension_store.begun.wait()
        await asyncio.wait_for(host.monitor.freeze_idle(), SOON_S)
        assert idle.is_paused
        suspension_store.go_on.set()
        await eviction


# Places


async def test_slow_guest_does_not_delay_other_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory_module, "FREE_SLOT_TIMEOUT_S", 0.05)
    suspension_store = SlowSuspensionStore()
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=suspension_store, limit=1) as host:
        old = await host.sessions.open("acme:old", SessionParameters(PLAN, 60))
        old.used_at -= 100
        with pytest.raises(SandboxUnavailable, match="already holds"):
            await asyncio.wait_for(host.sessions.open("acme:new", SessionParameters(PLAN, SOON_S)), SOON_S)
        assert suspension_store.begun.is_set()
        suspension_store.go_on.set()
        async with old.lock:
            assert (old.archive is not None, old.sandbox) == (True, None)


async def test_container_whose_network_setup_fails_frees_its_slot(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:

        async def refuse(entry: HostSession, sandbox: Sandbox) -> None:
            raise RuntimeError("no way out")

        host.sessions._prepare_network = refuse
        with pytest.raises(RuntimeError):
            await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert (host.alive, host.factory.slots.used, len(host.sessions)) == ([], 0, 0)


# Archives


async def test_session_with_a_damaged_archive_restarts_without_it(host: FakeHost) -> None:
    entry = await give_up(host)
    host.suspension_store.refuse_to_unpack = 99
    for _ in range(3):
        with pytest.raises(SandboxUnavailable, match="damaged"):
            await host.sessions.use("acme:s", "c")
    assert (host.alive, host.factory.slots.used) == ([], 0)
    _, sandbox = await host.sessions.use("acme:s", "c")
    description = entry.describe_sandbox(sandbox)
    assert description["rebuilt"] is True
    assert "cannot be unpacked" in description["news"]
    assert host.suspension_store.archives == {}


async def test_lost_archive_is_reported_before_an_empty_sandbox(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        await give_up(host)
        host.suspension_store.refuse_to_unpack = 99
        for _ in range(3):
            with pytest.raises(SandboxUnavailable, match="damaged"):
                await host.sessions.use("acme:s", "c")
        with pytest.raises(SandboxUnavailable, match="files are lost"):
            await host.sessions.use("acme:s", "c")
        await host.sessions.use("acme:s", "c")


async def test_session_record_does_not_name_a_used_archive(tmp_path: Path) -> None:
    workspaces, suspension_store = MemoryWorkspaces(), MemorySuspensionStore()
    first = build_host(tmp_path, workspaces=workspaces, suspension_store=suspension_store)
    await give_up(first)
    suspension_store.refuse_to_forget = True
    await first.sessions.use("acme:s", "c")
    assert [record.archive for record in first.records.sessions()] == [None]
    await end_process(first)
    suspension_store.refuse_to_forget = False
    async with open_host(tmp_path, workspaces=workspaces, suspension_store=suspension_store) as second:
        second.sessions.adopt()
        await second.sessions.sweep()
        entry, sandbox = await second.sessions.use("acme:s", "c")
        assert (suspension_store.archives, "restarted" in entry.describe_sandbox(sandbox)["news"]) == ({}, True)


async def test_session_that_cannot_be_recorded_keeps_its_container(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        (tmp_path / "test" / "sessions").rmdir()
        assert not await host.sessions.suspender.give_up(entry, must_be_idle=False)
        assert (entry.sandbox is not None, entry.archive, host.suspension_store.archives) == (True, None, {})


async def test_unwritable_state_folder_is_reported(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        (tmp_path / "test" / "containers").rmdir()
        with pytest.raises(SandboxUnavailable, match="TOOLCREW_SANDBOXD_STATE"):
            await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert host.factory.slots.used == 0


# Ends


async def test_shutdown_packs_a_memory_workspace_despite_a_background_job(tmp_path: Path) -> None:
    suspension_store = MemorySuspensionStore()
    first = build_host(tmp_path, suspension_store=suspension_store)
    await first.sessions.open("acme:s", SessionParameters(PLAN, 60))
    first.engine.guests[0].attests = {"jobs": 1}
    await first.sessions.suspend_all(SOON_S)
    await end_process(first)
    second = build_host(tmp_path, suspension_store=suspension_store)
    assert second.sessions.adopt() == 1
    entry, sandbox = await second.sessions.use("acme:s", "c")
    assert "background jobs have ended" in entry.describe_sandbox(sandbox)["news"]
    assert len(suspension_store.unpacked) == 1
    await end_host(second)


async def test_call_during_shutdown_does_not_lose_the_packed_session(tmp_path: Path) -> None:
    suspension_store = SlowSuspensionStore()
    async with open_host(tmp_path, suspension_store=suspension_store) as host:
        suspension_store.go_on.set()
        entry = await give_up(host)
        suspension_store.begun.clear()
        suspension_store.go_on.clear()
        call = asyncio.create_task(host.sessions.use("acme:s", "c"))
        await suspension_store.begun.wait()
        ending = asyncio.create_task(host.sessions.suspend_all(SOON_S))
        await asyncio.sleep(0)
        suspension_store.go_on.set()
        await ending
        with pytest.raises(SandboxUnavailable, match="stopping"):
            await call
        assert (host.alive, entry.archive in suspension_store.archives, len(host.records.sessions())) == ([], True, 1)


async def test_no_call_starts_during_shutdown(host: FakeHost) -> None:
    await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
    host.factory.is_ending = True
    with pytest.raises(SandboxUnavailable, match="stopping"):
        await host.sessions.use("acme:s", "c")


# The next sandboxd


async def test_kept_session_with_another_workspace_kind_is_not_adopted(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    first = build_host(tmp_path, workspaces=workspaces)
    await first.sessions.open("acme:s", SessionParameters(PLAN, 60))
    await end_process(first)
    second = build_host(tmp_path)  # in memory
    assert second.sessions.adopt() == 0
    with pytest.raises(ToolFailure) as refused:
        await second.sessions.use("acme:s", "c")
    assert refused.value.code is ErrorCode.SESSION_NOT_FOUND
    await end_host(second)
    async with open_host(tmp_path, workspaces=workspaces) as third:
        assert third.sessions.adopt() == 1


async def test_adopted_session_uses_the_current_limits_of_its_class(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    first = build_host(tmp_path, workspaces=workspaces)
    await first.sessions.open(
        "acme:s", SessionParameters(replace(PLAN, runtime="weak", network="egress", image="gone", pids=9999), 60)
    )
    await end_process(first)
    async with open_host(tmp_path, workspaces=workspaces) as second:
        second.sessions.adopt()
        await second.sessions.use("acme:s", "c")
        config = second.engine.guests[0].config
        assert config["HostConfig"]["Runtime"] == "runc"
        assert config["Image"] == "default"
        assert config["HostConfig"]["PidsLimit"] == PLAN.pids
        assert "--proxy" not in config["Entrypoint"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workspace", "../../etc"),
        ("id", "a:b:c"),
        ("ttl_s", "long"),
        ("plan", {}),
        ("version", 2),
        ("kind", "disk"),
        ("ttl_s", None),
    ],
)
async def test_invalid_session_record_is_renamed(host: FakeHost, tmp_path: Path, name: str, value: object) -> None:
    await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
    (path,) = (tmp_path / "test" / "sessions").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert host.records.sessions() == []
    assert path.with_suffix(".bad").exists()


# Calls that wait


async def test_waiting_call_of_a_disconnected_worker_never_reaches_the_guest(tmp_path: Path) -> None:
    ran: list[str] = []

    async def record_requests(guest: FakeGuest) -> None:
        await guest.hello()
        while True:
            request, _ = await guest.request()
            ran.append(request["op"])
            await guest.done(request)

    suspension_store = SlowSuspensionStore()
    async with running_sandboxd(
        tmp_path, echoing, record_requests, workspaces=MemoryWorkspaces(), suspension_store=suspension_store
    ) as daemon:
        client, name = await daemon.open()
        entry = await pack(daemon, name, suspension_store)
        calling = asyncio.create_task(asyncio.to_thread(client.call, name, EXEC))
        await suspension_store.begun.wait()
        client._sock.shutdown(2)
        with pytest.raises(SandboxUnavailable):
            await calling
        suspension_store.go_on.set()
        async with entry.lock:
            pass
        assert (await asyncio.to_thread(daemon.client().status))["ok"] is True
        assert ran == []


async def test_call_that_waits_for_its_sandbox_can_be_cancelled(tmp_path: Path) -> None:
    suspension_store = SlowSuspensionStore()
    async with running_sandboxd(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=suspension_store) as daemon:
        client, name = await daemon.open()
        entry = await pack(daemon, name, suspension_store)
        calling = asyncio.create_task(asyncio.to_thread(client.call, name, EXEC, call_id="c1"))
        await suspension_store.begun.wait()
        assert await asyncio.to_thread(daemon.client().cancel, name, "c1") is True
        suspension_store.go_on.set()
        with pytest.raises(ToolFailure) as refused:
            await calling
        assert (refused.value.code, entry.waiting) == (ErrorCode.CANCELLED, [])


# Recipients of events


async def test_checkpoint_does_not_consume_the_loss_report(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        entry = daemon.session(name)
        await entry.sandbox.remove()
        for _ in range(2):
            with pytest.raises(SandboxUnavailable, match="files are lost"):
                await asyncio.to_thread(client.checkpoint, name)
        with pytest.raises(SandboxUnavailable, match="files are lost"):
            await asyncio.to_thread(client.call, name, EXEC)
        assert "error" not in (await asyncio.to_thread(client.call, name, EXEC)).done


# Restoring


class SlowCheckpoints:
    """A store of checkpoints that restores, or fails, when the test says so."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.loads = 0
        self.is_broken = False

    async def load(self, tenant: str, checkpoint: str, sandbox: Sandbox, *, root_image: str | None) -> bool:
        self.loads += 1
        self.begun.set()
        await self.go_on.wait()
        if self.is_broken:
            raise ToolFailure(ErrorCode.FILE_NOT_FOUND, "no such checkpoint")
        return True


async def test_session_is_usable_after_its_single_restore(tmp_path: Path) -> None:
    checkpoints = SlowCheckpoints()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints) as daemon:
        opening = [asyncio.create_task(daemon.open(restore="c")) for _ in range(2)]
        await checkpoints.begun.wait()
        with pytest.raises(ToolFailure) as refused:
            await asyncio.to_thread(daemon.client().call, "acme:s1", EXEC)
        assert refused.value.code is ErrorCode.SESSION_NOT_FOUND
        checkpoints.go_on.set()
        await asyncio.gather(*opening)
        assert (checkpoints.loads, len(daemon.host.alive)) == (1, 1)


async def test_failed_restore_leaves_nothing(tmp_path: Path) -> None:
    checkpoints, workspaces = SlowCheckpoints(), MemoryWorkspaces()
    checkpoints.is_broken = True
    checkpoints.go_on.set()
    async with running_sandboxd(tmp_path, checkpoints=checkpoints, workspaces=workspaces) as daemon:
        with pytest.raises(ToolFailure, match="no such checkpoint"):
            await daemon.open(restore="c")
        host = daemon.host
        assert host.alive == []
        assert workspaces.alive == {}
        assert host.records.sessions() == []
        assert host.factory.slots.used == 0
        assert len(host.sessions) == 0


async def test_session_that_cannot_be_packed_keeps_its_container(host: FakeHost, entry: HostSession) -> None:
    host.suspension_store.refuse = 1
    assert not await host.sessions.suspender.give_up(entry, must_be_idle=False)
    assert (await host.sessions.use("acme:s"))[1] is entry.sandbox


async def test_session_with_a_background_job_is_neither_frozen_nor_evicted(host: FakeHost, entry: HostSession) -> None:
    host.engine.guests[0].attests = {"jobs": 1}
    assert not await host.sessions.suspender.pause(entry)
    assert not await host.sessions.suspender.give_up(entry, must_be_idle=False)
    assert len(host.alive) == 1


async def test_frozen_session_is_thawed_by_its_next_call(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, workspaces=MemoryWorkspaces()) as daemon:
        client, name = await daemon.open()
        entry = daemon.session(name)
        assert await daemon.sessions.suspender.pause(entry)
        assert daemon.engine.paused == set(daemon.host.alive)
        assert "error" not in (await asyncio.to_thread(client.call, name, EXEC)).done
        assert daemon.engine.paused == set()


async def test_call_during_an_eviction_waits_and_runs(tmp_path: Path) -> None:
    store = SlowSuspensionStore()
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=store) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        giving_up = asyncio.create_task(host.sessions.suspender.give_up(entry, must_be_idle=False))
        await store.begun.wait()
        using = asyncio.create_task(host.sessions.use("acme:s"))
        store.go_on.set()
        assert await giving_up
        assert (await using)[1].generation == 2


async def test_full_host_evicts_the_session_that_was_idle_longest(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), limit=2) as host:
        old, new = (
            await host.sessions.open("acme:old", SessionParameters(PLAN, 60)),
            await host.sessions.open("acme:new", SessionParameters(PLAN, 60)),
        )
        old.used_at -= 100
        new.used_at -= 50
        await host.sessions.open("acme:third", SessionParameters(PLAN, 60))
        assert (old.sandbox, new.sandbox is not None, len(host.alive)) == (None, True, 2)


class SlowTenantStore(MemorySuspensionStore):
    """A store in which sessions of the tenant `slow` are packed when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.go_on = asyncio.Event()
        self.refused: set[str] = set()

    async def pack(self, session: HostSession, sandbox: Sandbox) -> str:
        self.begun.append(session.id)
        if session.id in self.refused:
            raise SandboxUnavailable("it cannot be packed")
        if session.tenant.startswith("slow"):
            await self.go_on.wait()
        return await super().pack(session, sandbox)


async def open_idle(host: FakeHost, *names: str) -> list[HostSession]:
    """Open sessions, of which the first was idle for the longest time."""
    entries = [await host.sessions.open(name, SessionParameters(PLAN, 60)) for name in names]
    for number, entry in enumerate(entries):
        entry.used_at -= 100 - number
    return entries


async def test_slow_evictions_of_one_tenant_delay_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.sandboxd.evictions.SLOW_S", 0.02)
    store = SlowTenantStore()
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=store, limit=4) as host:
        *_, quick = await open_idle(host, "slow:a", "slow:b", "slow:c", "quick:d")
        async with asyncio.timeout(SOON_S):
            await host.sessions.open("acme:new", SessionParameters(PLAN, 60))
        assert (store.begun[0], quick.sandbox) == ("slow:a", None)
        store.go_on.set()


async def test_evictions_of_all_callers_together_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.workers.sandboxd.evictions.SLOW_S", 0.01)
    monkeypatch.setattr(factory_module, "FREE_SLOT_TIMEOUT_S", 0.3)
    store = SlowTenantStore()
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=store, limit=20) as host:
        await open_idle(host, *(f"slow-{number % 2}:{number}" for number in range(20)))
        opening = [host.sessions.open(f"acme:{number}", SessionParameters(PLAN, 60)) for number in range(15)]
        results = await asyncio.gather(*opening, return_exceptions=True)
        assert all(isinstance(result, SandboxUnavailable) for result in results)
        assert len(store.begun) < MAX_EVICTIONS
        store.go_on.set()


async def test_session_that_could_not_be_packed_is_tried_last(tmp_path: Path) -> None:
    store = SlowTenantStore()
    store.refused = {"acme:a"}
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=store, limit=3) as host:
        first, second, third = await open_idle(host, "acme:a", "acme:b", "acme:c")
        await host.sessions.open("acme:new", SessionParameters(PLAN, 60))
        first.checked_at = 0.0
        await host.sessions.open("acme:newer", SessionParameters(PLAN, 60))
        assert store.begun == ["acme:a", "acme:b", "acme:c"]
        assert (first.sandbox is not None, second.sandbox, third.sandbox) == (True, None, None)


async def test_slow_tenant_does_not_delay_the_packing_of_others_at_the_end(tmp_path: Path) -> None:
    store = SlowTenantStore()
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), suspension_store=store, limit=30) as host:
        *_, other = await open_idle(host, *(f"slow:{number}" for number in range(20)), "acme:other")
        ending = asyncio.create_task(host.sessions.suspend_all(SOON_S))
        await wait_until_async(lambda: other.sandbox is None, SOON_S, "the session of the other tenant is stored")
        store.go_on.set()
        await ending


async def test_session_record_without_a_workspace_is_not_adopted(tmp_path: Path) -> None:
    first = build_host(tmp_path, workspaces=MemoryWorkspaces())
    await first.sessions.open("acme:s", SessionParameters(PLAN, 60))
    first.lease.give_back()
    async with open_host(tmp_path, workspaces=MemoryWorkspaces()) as second:
        assert second.sessions.adopt() == 0
        assert second.records.sessions() == []
    await first.engine.end()


async def test_close_deletes_the_workspace_archive_and_record(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        await host.sessions.suspender.give_up(entry, must_be_idle=False)
        await host.sessions.close("acme:s")
        assert (workspaces.alive, host.suspension_store.archives, host.records.sessions()) == ({}, {}, [])


async def test_failed_workspace_removal_is_repeated(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces) as host:
        await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        workspaces.refuse_removals = 1
        await host.sessions.close("acme:s")
        assert len(workspaces.alive) == 1
        await host.monitor.expire()
        assert workspaces.alive == {}


async def test_failed_start_leaves_no_workspace_slot_or_record(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces, limit=1) as host:
        host.engine.refuse_starts = 1
        with pytest.raises(SandboxUnavailable):
            await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert (workspaces.alive, host.factory.slots.used, host.records.containers()) == ({}, 0, [])


async def test_overfull_workspace_ends_its_sandbox_once_and_allows_deletes(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces(is_hard=False)
    async with open_host(tmp_path, workspaces=workspaces) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        workspaces.overfull = {entry.workspace.name: 2 * PLAN.workspace_bytes}
        await host.monitor.end_overfull()
        assert "delete files" in str(entry.sandbox.lost)
        _, sandbox = await host.sessions.use("acme:s")
        await host.monitor.end_overfull()
        assert sandbox.lost is None
        workspaces.overfull = {entry.workspace.name: 3 * PLAN.workspace_bytes}
        await host.monitor.end_overfull()
        assert sandbox.lost is not None


async def test_nearly_full_disk_ends_sandboxes_and_refuses_calls(tmp_path: Path) -> None:
    class Disk(DiskMonitor):
        words: str | None = "the disk has only 5 bytes free: make room"

        def find_shortage(self) -> str | None:
            return self.words

    async with open_host(tmp_path, workspaces=MemoryWorkspaces()) as host:
        disk = Disk(tmp_path, 0)
        monitor = SessionMonitor(host.sessions, host.factory, host.reaper, IdleTimes(60, 60), disk)
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        await monitor.watch_disk()
        assert "make room" in str(entry.sandbox.lost)
        with pytest.raises(SandboxUnavailable, match="make room"):
            await host.sessions.use("acme:s")
        disk.words = None
        await monitor.watch_disk()
        assert (await host.sessions.use("acme:s"))[1].lost is None


def test_disk_shortage_ends_above_the_floor_plus_a_quarter(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert DiskMonitor(tmp_path, free // 2).find_shortage() is None
    watch = DiskMonitor(tmp_path, free * 2)
    assert "make room" in str(watch.find_shortage())
    watch._stop_bytes = int(free * 0.9)
    assert watch.find_shortage() is not None
    watch._stop_bytes = free // 2
    assert watch.find_shortage() is None
