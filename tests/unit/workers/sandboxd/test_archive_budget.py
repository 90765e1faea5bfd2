"""The memory that all archives of a sandboxd share."""

import asyncio

import pytest

from tests.support.stack.waiting import SOON_S
from toolcrew.workers.sandboxd.budgets import FairBudget


async def hold(budget: FairBudget, tenant: str, inside: asyncio.Semaphore, go_on: asyncio.Event) -> None:
    async with budget.hold(tenant, 10):
        inside.release()
        await go_on.wait()


async def test_archives_of_all_tenants_stay_within_the_total() -> None:
    budget, inside, go_on = FairBudget(30, 20), asyncio.Semaphore(0), asyncio.Event()
    holders = [asyncio.create_task(hold(budget, tenant, inside, go_on)) for tenant in "aabbcc"]
    for _ in range(3):
        await inside.acquire()
    await asyncio.sleep(0)

    assert (budget.used, inside.locked()) == (30, True)
    go_on.set()
    await asyncio.gather(*holders)
    assert budget.used == 0


async def test_a_tenant_whose_share_is_used_stops_no_other() -> None:
    budget, inside, go_on = FairBudget(30, 20), asyncio.Semaphore(0), asyncio.Event()
    greedy = [asyncio.create_task(hold(budget, "greedy", inside, go_on)) for _ in range(5)]
    for _ in range(2):
        await inside.acquire()

    async with budget.hold("other", 10):
        assert budget.used == 30
    go_on.set()
    await asyncio.gather(*greedy)


async def test_tenants_together_leave_a_part_for_another() -> None:
    budget, inside, go_on = FairBudget(120), asyncio.Semaphore(0), asyncio.Event()
    holders = [asyncio.create_task(hold(budget, tenant, inside, go_on)) for tenant in ("slow-a", "slow-b") * 12]
    for _ in range(8):
        await inside.acquire()
    async with asyncio.timeout(SOON_S), budget.hold("other", 20):
        pass
    go_on.set()
    await asyncio.gather(*holders)
    assert budget.used == 0


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_cancelled_holder_gives_its_bytes_back(is_waiting: bool) -> None:
    budget, inside, go_on = FairBudget(10, 10), asyncio.Semaphore(0), asyncio.Event()
    first = asyncio.create_task(hold(budget, "a", inside, go_on))
    await inside.acquire()
    second = asyncio.create_task(hold(budget, "a", inside, go_on))
    await asyncio.sleep(0)
    (second if is_waiting else first).cancel()
    await asyncio.wait({second if is_waiting else first})
    go_on.set()
    await asyncio.wait({first, second})

    assert budget.used == 0
