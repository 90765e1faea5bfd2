"""Containers without an owner are removed, and the warm pool holds unused, attested sandboxes for new sessions."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.fake_engine import CLEAN, FakeGuest, echoing
from tests.support.sandboxd.fake_sandboxd import (
    PLAN,
    SETTINGS,
    FakeHost,
    MemoryWorkspaces,
    build_listed_container,
    open_host,
    sandbox_of,
)
from tests.support.stack.waiting import SOON_S, until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.contract.tenant_classes import TenantClass
from toolcrew.workers.sandboxd import pool as pool_module
from toolcrew.workers.sandboxd.leases import Lease
from toolcrew.workers.sandboxd.monitor import IdleTimes
from toolcrew.workers.sandboxd.plans import Plans
from toolcrew.workers.sandboxd.pool import PoolLimits, WarmPools
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.runtime.hardening import AUTHORITIES
from toolcrew.workers.sandboxd.sessions import SessionParameters


def hold_lease(folder: Path, name: str, sender: Any, go: Any) -> None:
    sender.send(Lease.take(folder, name).label)
    go.recv()
    os._exit(9)


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Start another process that holds a lease. Return its label, a function that kills it, and the process."""
    context = multiprocessing.get_context("spawn")
    label_reader, sender = context.Pipe()
    end_reader, go = context.Pipe()
    process = context.Process(
        target=hold_lease, args=(tmp_path / "leases", "neighbour", sender, end_reader), daemon=True
    )
    process.start()
    yield label_reader.recv(), go, process
    process.kill()
    process.join()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[FakeHost]:
    async with open_host(tmp_path) as opened:
        yield opened


async def test_sweep_removes_orphaned_expired_and_unstarted_containers(tmp_path: Path) -> None:
    now = time.time()
    async with open_host(tmp_path) as host:
        host.engine.listed = [
            build_listed_container("predecessor", sandboxd="test"),
            build_listed_container("another", sandboxd="another"),
            build_listed_container(
                "other deployment", sandboxd="test", deployment="other", labels={"toolcrew.deadline": "1"}
            ),
            *(
                build_listed_container(f"deadline {shift}", labels={"toolcrew.deadline": str(int(now) + shift)})
                for shift in (-61, -30)
            ),
            *(build_listed_container(f"created {age}", state="created", created_at=now - age) for age in (10, 1000)),
        ]
        assert await host.reaper.sweep() == 3
        names = [container.name for container in host.engine.listed]
        assert names == ["another", "other deployment", "deadline -30", "created 10"]


async def test_sweep_keeps_containers_of_this_sandboxd(host: FakeHost) -> None:
    entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
    host.engine.listed = [
        build_listed_container(sandbox_of(entry).name, sandboxd="test", labels={"toolcrew.deadline": "1"})
    ]
    assert await host.reaper.sweep() == 0


@pytest.mark.parametrize("deadline", ["", "soon", "-1", "²", "1e3"])
async def test_invalid_deadline_label_never_expires(host: FakeHost, deadline: str) -> None:
    host.engine.listed = [build_listed_container("a", labels={"toolcrew.deadline": deadline})]
    assert await host.reaper.sweep() == 0


async def test_sweep_removes_containers_only_of_a_dead_sandboxd(
    tmp_path: Path, neighbour: tuple[str, Any, Any]
) -> None:
    label, go, process = neighbour
    async with open_host(tmp_path) as host:
        host.engine.listed = [build_listed_container("a", lease=label)]
        assert await host.reaper.sweep() == 0
        go.send("end")
        process.join()
        assert await host.reaper.sweep() == 1
        assert not [*(tmp_path / "leases").glob("neighbour*")]
        with pytest.raises(SandboxUnavailable, match="another sandboxd"):
            Lease.take(tmp_path / "leases", "test")


@pytest.mark.parametrize("label", ["", "x", "elsewhere/1.lease", "a/b/../../etc/passwd", "/gone.lease"])
async def test_lease_label_outside_the_folder_is_not_judged(host: FakeHost, label: str) -> None:
    assert not host.lease.is_dead(label)


async def test_second_sandboxd_with_the_same_name_is_refused(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path, "one")
    with pytest.raises(SandboxUnavailable, match="TOOLCREW_SANDBOXD_NAME"):
        Lease.take(tmp_path, "one")
    other = Lease.take(tmp_path, "two")
    lease.give_back()
    Lease.take(tmp_path, "one").give_back()
    other.give_back()


async def test_container_record_exists_from_before_start_until_removal(host: FakeHost) -> None:
    host.engine.start_gate.clear()

    opening = asyncio.create_task(host.sessions.open("acme:s", SessionParameters(PLAN, 60)))
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


async def test_records_of_removed_containers_are_deleted(host: FakeHost) -> None:
    host.records.add_container("gone", 0)
    host.records.add_container("there", 0)
    host.engine.listed = [build_listed_container("there", sandboxd="another")]
    await host.reaper.sweep()
    assert host.records.containers() == ["there"]


def test_unreadable_session_record_is_renamed(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"id": 1}')):
        (tmp_path / "sessions" / f"{name}.json").write_text(text)
    assert records.sessions() == []
    assert len(list((tmp_path / "sessions").glob("*.bad"))) == 3


async def test_idle_sessions_are_frozen_and_later_evicted(tmp_path: Path) -> None:
    async with open_host(tmp_path, workspaces=MemoryWorkspaces(), idle=IdleTimes(pause_s=10, evict_s=100)) as host:
        fresh, idle, long = [
            await host.sessions.open(f"acme:{name}", SessionParameters(PLAN, 9999))
            for name in ("fresh", "idle", "long")
        ]
        idle.used_at -= 20
        long.used_at -= 200
        await host.monitor.evict_idle()
        await host.monitor.freeze_idle()
        assert (fresh.is_ready, idle.is_paused, long.sandbox) == (True, True, None)


async def test_evicted_session_expires_after_its_ttl(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        await host.sessions.suspender.give_up(entry, must_be_idle=False)
        entry.used_at -= 61
        await host.monitor.expire()
        assert (len(host.sessions), workspaces.alive) == (0, {})


async def test_session_with_a_running_call_does_not_expire(host: FakeHost) -> None:
    entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
    sandbox_of(entry).begin("c", {"op": "exec", "timeout_s": 5}, 0, lambda _: None)
    entry.used_at -= 61
    await host.monitor.expire()
    assert len(host.sessions) == 1


async def test_expiry_continues_after_a_failed_removal(host: FakeHost) -> None:
    for name in ("a", "b"):
        (await host.sessions.open(f"acme:{name}", SessionParameters(PLAN, 60))).used_at -= 61
    host.engine.refuse_removals = 1
    await host.monitor.expire()
    assert len(host.sessions) == 1
    await host.monitor.expire()
    assert len(host.sessions) == 0


QUICK = PoolLimits(target=2, refill_per_s=1000, memory_floor_bytes=0, keep_s=3600)


async def start_filling(host: FakeHost, count: int = 2) -> "asyncio.Task[None]":
    filling = asyncio.create_task(host.pools.keep_filled())
    await until(lambda: len(host.pools) == count)
    return filling


async def test_warm_sandbox_gets_the_secret_placeholders_of_its_session(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK) as host:
        (await start_filling(host)).cancel()
        plan = replace(PLAN, secrets=(("TOKEN", "tcs_placeholder_1"),))
        warm = set(host.alive)
        entry = await host.sessions.open("acme:s", SessionParameters(plan, 60))
        assert sandbox_of(entry).container in warm
        variables = host.engine.alive[sandbox_of(entry).container].variables
        assert (variables["TOKEN"], variables["SSL_CERT_FILE"]) == ("tcs_placeholder_1", AUTHORITIES)
        other = await host.sessions.open("acme:other", SessionParameters(PLAN, 60))
        assert host.engine.alive[sandbox_of(other).container].variables == {}


async def test_warm_sandbox_that_refuses_placeholders_is_not_used(tmp_path: Path) -> None:
    async def refuse_placeholders(guest: FakeGuest) -> None:
        await guest.hello()
        while True:
            request, _ = await guest.request()
            fields = CLEAN if request["op"] == "attest" else {"error": {"code": "INTERNAL", "message": "no"}}
            await guest.done(request, **fields)

    async with open_host(tmp_path, refuse_placeholders, pool=replace(QUICK, target=1)) as host:
        (await start_filling(host, 1)).cancel()
        with pytest.raises(SandboxUnavailable, match="did not accept variables"):
            await host.sessions.open("acme:s", SessionParameters(replace(PLAN, secrets=(("TOKEN", "tcs_1"),)), 60))
        assert host.alive == []


@pytest.mark.parametrize(
    "dirt",
    [
        {"processes": 1},
        {"zombies": 1},
        {"jobs": 1},
        {"entries": {"workspace": 1, "tmp": 0, "output": 0, "shm": 0}},
        {"processes": "none"},
    ],
)
async def test_warm_sandbox_that_is_not_clean_is_never_used(tmp_path: Path, dirt: dict[str, object]) -> None:
    async with open_host(tmp_path, pool=replace(QUICK, target=1)) as host:
        (await start_filling(host, 1)).cancel()
        dirty = host.alive[0]
        host.engine.guests[0].attests = dirt
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert sandbox_of(entry).container != dirty
        assert dirty not in host.alive


async def test_warm_sandbox_that_died_is_replaced(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK) as host:
        filling = await start_filling(host)
        first = host.alive[0]
        host.engine.alive[first].die()
        await until(lambda: first not in host.alive)
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert sandbox_of(entry).lost is None
        filling.cancel()


async def test_warm_pool_gives_its_slots_to_sessions(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK, limit=2) as host:
        (await start_filling(host)).cancel()
        await host.sessions.open("acme:s", SessionParameters(replace(PLAN, image="python"), 60))
        assert (len(host.pools), len(host.alive)) == (1, 2)


async def test_warm_pool_is_not_filled_while_memory_is_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked = asyncio.Event()

    def report_low_memory() -> int:
        is_asked.set()
        return PLAN.memory_reserve_bytes

    monkeypatch.setattr(pool_module, "available_memory", report_low_memory)
    async with open_host(tmp_path, pool=replace(QUICK, memory_floor_bytes=1)) as host:
        filling = asyncio.create_task(host.pools.keep_filled())
        await asyncio.wait_for(is_asked.wait(), SOON_S)
        assert host.engine.guests == []
        filling.cancel()


async def test_failed_pool_fill_leaves_no_workspace_and_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die_at_start(guest: FakeGuest) -> None:
        guest.die()

    monkeypatch.setattr(pool_module, "RETRY_S", 0.01)
    workspaces = MemoryWorkspaces()
    async with open_host(tmp_path, die_at_start, echoing, workspaces=workspaces, pool=replace(QUICK, target=1)) as host:
        (await start_filling(host, 1)).cancel()
        assert (len(workspaces.alive), host.factory.slots.used) == (1, 1)


async def test_warm_sandbox_above_its_maximum_age_is_replaced(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=replace(QUICK, target=1, keep_s=0.05)) as host:
        filling = await start_filling(host, 1)
        first = host.alive[0]
        await asyncio.sleep(0.06)
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert sandbox_of(entry).container != first
        filling.cancel()


async def test_pool_fill_continues_when_a_sandbox_is_taken_meanwhile(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK) as host:
        (await start_filling(host)).cancel()
        for guest in host.engine.guests:
            guest.die()
        pool = host.pools._pools[PLAN]
        await until(lambda: all(warm.sandbox.is_removed for warm in pool._ready))
        for warm in pool._ready:  # both would not go at first
            warm.sandbox.is_removed = False
        host.engine.remove_gate.clear()
        host.engine.removing.clear()
        filling = asyncio.create_task(host.pools.keep_filled())
        await host.engine.removing.wait()
        giving_up = asyncio.create_task(host.pools.give_up_one())
        await asyncio.sleep(0)
        host.engine.remove_gate.set()
        await giving_up
        await until(lambda: len(host.pools) == 2 and len(host.alive) == 2)
        assert not filling.done()
        filling.cancel()


async def test_warm_sandbox_of_a_rebuilt_image_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RETRY_S", 0.01)
    async with open_host(tmp_path, pool=QUICK) as host:
        filling = await start_filling(host)
        old = set(host.alive)
        host.engine.image = "sha256:2"
        await until(lambda: len(host.pools) == 2 and not old & set(host.alive))
        filling.cancel()


async def test_each_plan_has_its_own_pool_filled_at_one_shared_rate(tmp_path: Path) -> None:
    classes = {
        "default": TenantClass(pool={"python": 1}),
        "small": TenantClass(pids=64, pool={"default": 1}),
        "same": TenantClass(pool={"default": 1}),
    }
    plans = Plans(SETTINGS.model_copy(update={"tenant_classes": classes, "pool_size": 1}))
    small, python = plans.choose(SandboxPolicy(tenant_class="small")), plans.choose(SandboxPolicy(), "python")
    assert plans.pooled() == {PLAN: 2, python: 1, small: 1}
    async with open_host(tmp_path) as host:
        pools = WarmPools(host.factory, plans.pooled(), replace(QUICK, refill_per_s=30))
        started = asyncio.get_running_loop().time()
        filling = asyncio.create_task(pools.keep_filled())
        await until(lambda: len(pools) == 4)
        assert asyncio.get_running_loop().time() - started >= 1 / 10
        filling.cancel()
        warm = await pools.take(small)
        assert host.engine.alive[warm.sandbox.container].config["HostConfig"]["PidsLimit"] == 64
        assert await pools.take(replace(small, cpus=9)) is None
        await host.factory.discard(warm.sandbox, warm.workspace)
        await pools.close()


def test_pool_with_an_image_not_allowed_by_its_class_is_refused() -> None:
    plans = Plans(SETTINGS.model_copy(update={"tenant_classes": {"default": TenantClass(pool={"evil": 1})}}))
    with pytest.raises(ValueError, match="may not use"):
        plans.pooled()
