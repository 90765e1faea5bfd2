"""The warm pools: sandboxes that no session has used yet, each with an empty workspace, for the first call of a
session.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.disks.base import Workspace
from workers.sandboxd.factory import SandboxFactory
from workers.sandboxd.plans import SandboxPlan
from workers.sandboxd.runtime.attestation import ask_attestation, find_dirt
from workers.sandboxd.sandbox import Sandbox

log = structlog.get_logger(__name__)

RETRY_S = 10.0
"""How long the pool waits after a sandbox that could not be made."""
BUSY_RETRY_S = 0.5


@dataclass(frozen=True, eq=False)
class WarmSandbox:
    """A sandbox that no session has had, and its workspace."""

    sandbox: Sandbox
    workspace: Workspace
    image_id: str | None
    made_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class PoolLimits:
    """How many to keep of the plan, how fast to make them (a second), and with how many bytes of memory left on the
    host at least.
    """

    target: int
    refill_per_s: float
    memory_floor_bytes: int
    keep_s: float


class WarmPool:
    """Sandboxes of one plan. Handed out once, never taken back."""

    def __init__(self, factory: SandboxFactory, plan: SandboxPlan, limits: PoolLimits) -> None:
        self.plan = plan
        self._factory = factory
        self._limits = limits
        self._ready: deque[WarmSandbox] = deque()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self.handed_out = 0
        self.turned_away = 0

    def __len__(self) -> int:
        return len(self._ready)

    async def take(self) -> WarmSandbox | None:
        """A sandbox that has proved to be clean, or None: then the caller makes one."""
        while self._ready:
            warm = self._ready.popleft()
            self._wanted.set()
            if await self._is_clean(warm):
                self.handed_out += 1
                return warm
            self.turned_away += 1
            await self._drop(warm)
        return None

    async def give_up_one(self) -> bool:
        """Remove a sandbox whose place a session needs; False when there is none."""
        if not self._ready:
            return False
        await self._drop(self._ready.pop())
        return True

    async def keep_filled(self) -> None:
        """For ever: one after the other, at most at the given rate, and not while memory is short or the host is
        full.
        """
        while True:
            await self._drop_outworn()
            if len(self._ready) >= self._limits.target:
                self._wanted.clear()
                with_timeout = asyncio.ensure_future(self._wanted.wait())
                await asyncio.wait({with_timeout}, timeout=RETRY_S)
                with_timeout.cancel()
                continue
            started = time.monotonic()
            pause_s = await self._add_one()
            await asyncio.sleep(max(pause_s, 1 / self._limits.refill_per_s - (time.monotonic() - started)))

    def describe(self) -> dict[str, int]:
        """For `status`."""
        return {
            "ready": len(self),
            "target": self._limits.target,
            "handed_out": self.handed_out,
            "turned_away": self.turned_away,
        }

    async def _add_one(self) -> float:
        """Gives how long to wait before the next, in seconds."""
        if (
            self._factory.is_ending
            or available_memory() < self._limits.memory_floor_bytes + self.plan.memory_reserve_bytes
        ):
            return RETRY_S
        if not self._factory.slots.try_take():
            return BUSY_RETRY_S
        try:
            workspace, image_id = await self._prepare()
            try:
                sandbox = await self._factory.make(self.plan, workspace, 1)
            except BaseException:
                await asyncio.shield(self._factory.discard_workspace(workspace))
                raise
        except SandboxUnavailable as error:
            log.warning("pool_not_filled", error=str(error))
            return RETRY_S
        self._ready.append(WarmSandbox(sandbox, workspace, image_id))
        return 0.0

    async def _prepare(self) -> tuple[Workspace, str | None]:
        """A workspace, and the image that its name stands for before the start: one that moves meanwhile is then
        found.
        """
        try:
            image_id = await self._factory.engine.image_id(self.plan.image)
            return await self._factory.make_workspace(self.plan), image_id
        except BaseException:
            self._factory.slots.give_back()
            raise

    async def _is_clean(self, warm: WarmSandbox) -> bool:
        if warm.sandbox.lost is not None or self._is_outworn(warm):
            return False
        try:
            dirt = find_dirt(await ask_attestation(warm.sandbox))
        except SandboxUnavailable as error:
            dirt = [str(error)]
        if dirt:
            log.error("pool_sandbox_not_clean", container=warm.sandbox.container[:12], dirt=dirt)
        return not dirt

    async def _drop_outworn(self) -> None:
        image_id = await self._find_image()
        for warm in list(self._ready):
            is_old = image_id not in (None, warm.image_id)  # its name stands for another image now
            # Others take and give up meanwhile.
            if (is_old or warm.sandbox.lost is not None or self._is_outworn(warm)) and warm in self._ready:
                self._ready.remove(warm)
                await self._drop(warm)

    async def _find_image(self) -> str | None:
        try:
            return await self._factory.engine.image_id(self.plan.image) if self._ready else None
        except SandboxUnavailable:
            return None  # whoever starts something is told why

    def _is_outworn(self, warm: WarmSandbox) -> bool:
        return time.monotonic() - warm.made_at > self._limits.keep_s

    async def _drop(self, warm: WarmSandbox) -> None:
        try:
            await self._factory.discard(warm.sandbox, warm.workspace)
        except SandboxUnavailable as error:
            log.error("pool_sandbox_not_removed", error=str(error))  # the maker tries again


def available_memory() -> int:
    """Bytes that the host could still give out without swapping, as the kernel estimates."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


class WarmPools:
    """`targets`: how many sandboxes to keep of a plan; `limits`: of all together, but for `target`, which is a pool's
    own.
    """

    def __init__(self, factory: SandboxFactory, targets: Mapping[SandboxPlan, int], limits: PoolLimits) -> None:
        wanted = {plan: target for plan, target in targets.items() if target}
        rate = limits.refill_per_s / max(len(wanted), 1)
        self._pools = {
            plan: WarmPool(factory, plan, replace(limits, target=target, refill_per_s=rate))
            for plan, target in wanted.items()
        }

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    async def take(self, plan: SandboxPlan) -> WarmSandbox | None:
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
