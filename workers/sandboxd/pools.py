"""The warm pools of this host: one for each plan of which sandboxes are kept ready, all filled at one rate together."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.sandboxd.classes import SandboxPlan
from workers.sandboxd.making import Maker
from workers.sandboxd.pool import PoolLimits, Warm, WarmPool


class Pools:
    """`targets`: how many sandboxes to keep of a plan; `limits`: of all together, but for `target`, which is a pool's own."""

    def __init__(self, maker: Maker, targets: Mapping[SandboxPlan, int], limits: PoolLimits) -> None:
        wanted = {plan: target for plan, target in targets.items() if target}
        rate = limits.refill_per_s / max(len(wanted), 1)
        self._pools = {plan: WarmPool(maker, plan, replace(limits, target=target, refill_per_s=rate)) for plan, target in wanted.items()}

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    async def take(self, plan: SandboxPlan) -> Warm | None:
        """A sandbox of that very plan that has proved to be clean, or None: then the caller makes one."""
        pool = self._pools.get(plan)
        return await pool.take() if pool is not None else None

    async def give_up_one(self) -> bool:
        """Remove one of the fullest pool, whose place a session needs; False when there is none."""
        fullest = max(self._pools.values(), key=len, default=None)
        return fullest is not None and await fullest.give_up_one()

    async def keep_filled(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            for pool in self._pools.values():
                tasks.create_task(pool.keep_filled())

    async def close(self) -> None:
        """Remove all."""
        while await self.give_up_one():
            pass

    def describe(self) -> dict[str, Any]:
        """For `status`: of all together, and a row for each."""
        rows = [pool.describe() for pool in self._pools.values()]
        total = {name: sum(row[name] for row in rows) for name in ("ready", "target", "handed_out", "turned_away")}
        return {**total, "plans": [{"image": plan.image, **row} for plan, row in zip(self._pools, rows, strict=True)]}
