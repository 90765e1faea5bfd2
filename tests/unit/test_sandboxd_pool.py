"""The warm pool: never-used, attested clean, filled at a bounded rate, and given up for sessions."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_engine import FakeGuest, echoing
from tests.fake_sandboxd import PLAN, FakeHost, KeptWorkspaces, open_host
from workers.sandboxd import pool as pool_module
from workers.sandboxd.pool import PoolLimits

QUICK = PoolLimits(target=2, refill_per_s=1000, memory_floor_bytes=0, keep_s=3600)
SOON_S = 10.0


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_so():  # noqa: ASYNC110  # the pool tells nobody when it has made one
            await asyncio.sleep(0.001)


async def filled(host: FakeHost, count: int = 2) -> "asyncio.Task[None]":
    assert host.pool is not None
    filling = asyncio.create_task(host.pool.keep_filled())
    await until(lambda: len(host.pool or ()) == count)
    return filling


async def test_a_session_gets_a_warm_sandbox_with_its_workspace_and_the_pool_fills_up_again(tmp_path: Path) -> None:
    workspaces = KeptWorkspaces()
    async with open_host(tmp_path, workspaces=workspaces, pool=QUICK) as host:
        filling = await filled(host)
        warm = set(host.alive)
        entry = await host.sessions.open("acme:s", PLAN, 60)
        assert entry.sandbox is not None
        assert entry.sandbox.container in warm
        assert entry.workspace.name in workspaces.alive
        await until(lambda: len(host.alive) == 3)
        filling.cancel()


async def test_a_sandbox_of_the_pool_serves_one_session_only(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK) as host:
        (await filled(host)).cancel()
        entries = await asyncio.gather(*(host.sessions.open(f"acme:{number}", PLAN, 60) for number in range(4)))
        assert len({entry.sandbox.container for entry in entries if entry.sandbox is not None}) == 4


@pytest.mark.parametrize(
    "dirt",
    [{"processes": 1}, {"zombies": 1}, {"jobs": 1}, {"entries": {"workspace": 1, "tmp": 0, "output": 0, "shm": 0}}, {"processes": "none"}],
)
async def test_a_sandbox_that_is_not_clean_is_never_handed_out(tmp_path: Path, dirt: dict[str, object]) -> None:
    async with open_host(tmp_path, pool=replace(QUICK, target=1)) as host:
        (await filled(host, 1)).cancel()
        dirty = host.alive[0]
        host.engine.guests[0].attests = dirt
        entry = await host.sessions.open("acme:s", PLAN, 60)
        assert entry.sandbox is not None
        assert entry.sandbox.container != dirty
        assert dirty not in host.alive


async def test_a_sandbox_that_died_in_the_pool_is_replaced(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK) as host:
        filling = await filled(host)
        first = host.alive[0]
        host.engine.alive[first].die()
        await until(lambda: first not in host.alive)
        entry = await host.sessions.open("acme:s", PLAN, 60)
        assert entry.sandbox is not None
        assert entry.sandbox.lost is None
        filling.cancel()


async def test_another_plan_gets_a_sandbox_of_its_own(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK) as host:
        (await filled(host)).cancel()
        entry = await host.sessions.open("acme:s", replace(PLAN, image="python"), 60)
        assert entry.sandbox is not None
        assert host.engine.alive[entry.sandbox.container].config["Image"] == "python"
        assert host.pool is not None
        assert len(host.pool) == 2


async def test_the_pool_gives_its_places_up_for_sessions(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=QUICK, limit=2) as host:
        (await filled(host)).cancel()
        await host.sessions.open("acme:s", replace(PLAN, image="python"), 60)
        assert host.pool is not None
        assert (len(host.pool), len(host.alive)) == (1, 2)


async def test_the_pool_is_not_filled_while_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    def short() -> int:
        asked.set()
        return PLAN.memory_reserve_bytes

    monkeypatch.setattr(pool_module, "available_memory", short)
    async with open_host(tmp_path, pool=replace(QUICK, memory_floor_bytes=1)) as host:
        assert host.pool is not None
        filling = asyncio.create_task(host.pool.keep_filled())
        await asyncio.wait_for(asked.wait(), SOON_S)
        assert host.engine.guests == []
        filling.cancel()


async def test_it_is_filled_at_the_given_rate(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=replace(QUICK, target=4, refill_per_s=20)) as host:
        started = asyncio.get_running_loop().time()
        (await filled(host, 4)).cancel()
        assert asyncio.get_running_loop().time() - started >= 3 / 20


async def test_a_pool_that_cannot_be_filled_leaves_no_workspace_and_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stillborn(guest: FakeGuest) -> None:
        guest.die()

    monkeypatch.setattr(pool_module, "RETRY_S", 0.01)
    workspaces = KeptWorkspaces()
    async with open_host(tmp_path, stillborn, echoing, workspaces=workspaces, pool=replace(QUICK, target=1)) as host:
        (await filled(host, 1)).cancel()
        assert (len(workspaces.alive), host.maker.room.taken) == (1, 1)


async def test_a_sandbox_that_has_waited_too_long_is_replaced(tmp_path: Path) -> None:
    async with open_host(tmp_path, pool=replace(QUICK, target=1, keep_s=0.05)) as host:
        filling = await filled(host, 1)
        first = host.alive[0]
        await asyncio.sleep(0.06)
        entry = await host.sessions.open("acme:s", PLAN, 60)
        assert entry.sandbox is not None
        assert entry.sandbox.container != first
        filling.cancel()
