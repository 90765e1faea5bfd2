"""Evictions for callers that wait for a slot: idle sessions give up their containers, a few at a time.

A program decides how long the packing of its session takes. So a slow eviction delays its caller for SLOW_S seconds
only: then a session of another tenant is tried too, in the order of how few evictions of its tenant run.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from toolcrew.workers.sandboxd.budgets import FairBudget
from toolcrew.workers.sandboxd.session import HostSession

SLOW_S = 1.0
"""Seconds that a caller waits for an eviction before another one begins."""
MAX_EVICTIONS = 12
"""Evictions at the same time, for all callers together."""


class Evictions:
    """The evictions of one host that callers wait for. `give_up`: evicts a session, and returns whether it did."""

    def __init__(self, give_up: Callable[[HostSession], Awaitable[bool]]) -> None:
        self._give_up = give_up
        self._places = FairBudget(MAX_EVICTIONS)
        self._running: dict[str, tuple[str, asyncio.Task[bool]]] = {}

    async def free_slot(self, find_idle: Callable[[], Iterable[HostSession]], is_free: Callable[[], bool]) -> bool:
        """Evict one of the idle sessions. Return whether a slot is free.

        Only one session is evicted for each caller, unless the eviction is slow: an evicted session must start a new
        sandbox at its next call.
        """
        while not is_free():
            self._begin_next(find_idle())
            if not self._running:
                return False
            tasks = [task for _, task in self._running.values()]
            done, _ = await asyncio.wait(tasks, timeout=SLOW_S, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done):
                return True
        return True

    def _begin_next(self, idle: Iterable[HostSession]) -> None:
        running = Counter(tenant for tenant, _ in self._running.values())
        waiting = [
            entry
            for entry in idle
            if entry.id not in self._running and not entry.lock.locked() and self._places.has_room(entry.tenant, 1)
        ]
        # A session that could not be packed before is tried last.
        order = min(waiting, key=lambda entry: (running[entry.tenant], entry.failed_packs, entry.used_at), default=None)
        if order is not None:
            task = asyncio.ensure_future(self._evict(order))
            self._running[order.id] = order.tenant, task
            task.add_done_callback(lambda _: self._running.pop(order.id))

    async def _evict(self, entry: HostSession) -> bool:
        async with self._places.hold(entry.tenant, 1):
            return await self._give_up(entry)
