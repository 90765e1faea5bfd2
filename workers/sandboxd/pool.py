"""Warm pools: unused sandboxes, each with an empty workspace, for the first call of a session.

A pool sandbox is handed out at most once and is never taken back. Immediately before that, its guest must report that
no program has run and no file has changed (attestation.py).
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import Workspace
from toolcrew.workers.sandboxd.factory import SandboxFactory
from toolcrew.workers.sandboxd.plans import SandboxPlan
from toolcrew.workers.sandboxd.runtime.attestation import ask_attestation, find_dirt
from toolcrew.workers.sandboxd.sandbox import Sandbox

log = structlog.get_logger(__name__)

RETRY_S = 10.0
"""Pause in seconds after a failed start."""
BUSY_RETRY_S = 0.5


@dataclass(frozen=True, eq=False)
class WarmSandbox:
    """A sandbox that no session has used, and its workspace."""

    sandbox: Sandbox
    workspace: Workspace
    image_id: str | None
    created_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class PoolLimits:
    """Limits of a pool. `target`: sandboxes to keep. `refill_per_s`: starts per second. `memory_floor_bytes`: memory
    that must stay available on the host. `keep_s`: the age at which a sandbox is replaced.
    """

    target: int
    refill_per_s: float
    memory_floor_bytes: int
    keep_s: float


class WarmPool:
    """Sandboxes of one plan. Each is handed out once and never taken back."""

    def __init__(self, factory: SandboxFactory, plan: SandboxPlan, limits: PoolLimits) -> None:
        self.plan = plan
        self._factory = factory
        self._limits = limits
        self._ready: deque[WarmSandbox] = deque()
        self._needs_refill = asyncio.Event()
        self._needs_refill.set()
        self.handed_out = 0
        self.turned_away = 0

    def __len__(self) -> int:
        return len(self._ready)

    async def take(self) -> WarmSandbox | None:
        """Return a sandbox whose guest has just reported that it is unused. Return None when the caller must start
        one.
        """
        while self._ready:
            # The pop comes before the first await, so two callers never get the same sandbox.
            warm = self._ready.popleft()
            self._needs_refill.set()
            if await self._is_clean(warm):
                self.handed_out += 1
                return warm
            self.turned_away += 1
            await self._drop(warm)
        return None

    async def give_up_one(self) -> bool:
        """Remove a sandbox because a session needs its slot. Returns False when the pool is empty."""
        if not self._ready:
            return False
        await self._drop(self._ready.pop())
        return True

    async def keep_filled(self) -> None:
        """Refill the pool until the task is cancelled: one sandbox after the other, at most at the configured rate, and
        not while memory is short or the host is full.
        """
        while True:
            await self._drop_outdated()
            if len(self._ready) >= self._limits.target:
                self._needs_refill.clear()
                refill = asyncio.ensure_future(self._needs_refill.wait())
                await asyncio.wait({refill}, timeout=RETRY_S)
                refill.cancel()
                continue
            started = time.monotonic()
            pause_s = await self._add_one()
            await asyncio.sleep(max(pause_s, 1 / self._limits.refill_per_s - (time.monotonic() - started)))

    def describe(self) -> dict[str, int]:
        """Return the counters for `status`."""
        return {
            "ready": len(self),
            "target": self._limits.target,
            "handed_out": self.handed_out,
            "turned_away": self.turned_away,
        }

    async def _add_one(self) -> float:
        """Start one sandbox. Returns the seconds to wait before the next."""
        if (
            self._factory.is_ending
            or available_memory() < self._limits.memory_floor_bytes + self.plan.memory_reserve_bytes
        ):
            return RETRY_S
        if not self._factory.slots.try_take():
            return BUSY_RETRY_S
        try:
            self._ready.append(await self._make())
        except SandboxUnavailable as error:
            log.warning("pool_not_filled", error=str(error))
            return RETRY_S
        return 0.0

    async def _make(self) -> WarmSandbox:
        async with AsyncExitStack() as stack:
            try:
                plan = await stack.enter_async_context(self._factory.pinned(self.plan))
                # Read the image's id before the start, to detect that the name changes to another image during the
                # start.
                image_id = plan.image_id or await self._factory.engine.image_id(plan.image)
                workspace = await self._factory.make_workspace(plan)
            except BaseException:
                self._factory.slots.give_back()
                raise
            try:
                return WarmSandbox(await self._factory.make(plan, workspace, 1), workspace, image_id)
            except BaseException:
                await asyncio.shield(self._factory.discard_workspace(workspace))
                raise

    async def _is_clean(self, warm: WarmSandbox) -> bool:
        if warm.sandbox.lost is not None or self._is_too_old(warm):
            return False
        try:
            findings = find_dirt(await ask_attestation(warm.sandbox))
        except SandboxUnavailable as error:
            findings = [str(error)]
        if findings:
            log.error("pool_sandbox_not_clean", container=warm.sandbox.container[:12], findings=findings)
        return not findings

    async def _drop_outdated(self) -> None:
        image_id = await self._find_image()
        for warm in list(self._ready):
            is_old = image_id not in (None, warm.image_id)  # the image's name refers to another image now
            # Other tasks take and remove sandboxes during the awaits.
            if (is_old or warm.sandbox.lost is not None or self._is_too_old(warm)) and warm in self._ready:
                self._ready.remove(warm)
                await self._drop(warm)

    async def _find_image(self) -> str | None:
        try:
            return await self._factory.engine.image_id(self.plan.image) if self._ready else None
        except SandboxUnavailable:
            return None  # the task itself logs its error

    def _is_too_old(self, warm: WarmSandbox) -> bool:
        return time.monotonic() - warm.created_at > self._limits.keep_s

    async def _drop(self, warm: WarmSandbox) -> None:
        try:
            await self._factory.discard(warm.sandbox, warm.workspace)
        except SandboxUnavailable as error:
            log.error("pool_sandbox_not_removed", error=str(error))  # the factory tries the removal again


def available_memory() -> int:
    """Return the kernel's estimate of the bytes that the host can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


class WarmPools:
    """Pools of sandboxes, one per plan. `targets`: how many sandboxes to keep of a plan. `limits` apply to all pools
    together, except `target`.
    """

    def __init__(self, factory: SandboxFactory, targets: Mapping[SandboxPlan, int], limits: PoolLimits) -> None:
        nonzero = {plan: target for plan, target in targets.items() if target}
        rate = limits.refill_per_s / max(len(nonzero), 1)
        self._pools = {
            plan: WarmPool(factory, plan, replace(limits, target=target, refill_per_s=rate))
            for plan, target in nonzero.items()
        }

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    async def take(self, plan: SandboxPlan) -> WarmSandbox | None:
        """Return a sandbox of exactly this plan whose guest has just reported that it is unused. Return None when the
        caller must start one.
        """
        pool = self._pools.get(plan)
        return await pool.take() if pool is not None else None

    async def give_up_one(self) -> bool:
        """Remove a sandbox of the fullest pool, because a session needs its slot. Returns False when all pools are
        empty.
        """
        fullest = max(self._pools.values(), key=len, default=None)
        return fullest is not None and await fullest.give_up_one()

    async def keep_filled(self) -> None:
        """Refill every pool until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for pool in self._pools.values():
                tasks.create_task(pool.keep_filled())

    async def close(self) -> None:
        """Remove all sandboxes of all pools."""
        while await self.give_up_one():
            pass

    def describe(self) -> dict[str, Any]:
        """Return the totals and one row per plan for `status`."""
        rows = [pool.describe() for pool in self._pools.values()]
        total = {name: sum(row[name] for row in rows) for name in ("ready", "target", "handed_out", "turned_away")}
        return {**total, "plans": [{"image": plan.image, **row} for plan, row in zip(self._pools, rows, strict=True)]}
