"""Threads for work whose time a tenant decides: parsing what the tenant sent, matching its patterns, packing its files.

Invariant: a tenant uses one thread at a time, and waiting tenants take turns. Work of one tenant therefore delays the
work of another by the length of one piece of work, however many pieces the first tenant has. The shared thread pool of
the event loop (`asyncio.to_thread`) is only for work whose time no tenant decides.
"""

import asyncio
import contextvars
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from toolcrew.concurrency.tasks import in_thread

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 4
"""Number of threads for the work of all tenants of a process."""


class TenantThreads:
    """The threads of one event loop."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        # Only one piece of work of a tenant waits here, and waiters are served in order: tenants take turns.
        self._free = asyncio.Semaphore(max_threads)
        self._turns: dict[str, asyncio.Lock] = {}
        self._users = Counter[str]()

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return the result of blocking work. Raises its errors. If the caller is cancelled, the work continues, and
        its thread counts until its end.
        """
        running = asyncio.ensure_future(self._run(tenant, partial(contextvars.copy_context().run, work)))
        running.add_done_callback(_retrieve)
        return await asyncio.shield(running)

    async def _run(self, tenant: str, work: Callable[[], T]) -> T:
        self._users[tenant] += 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()), self._free:
                return await in_thread(work, f"tenant-{tenant}")
        finally:
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._turns[tenant]


_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, TenantThreads]" = weakref.WeakKeyDictionary()


async def in_tenant_thread(tenant: str, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
    """Return the result of blocking work for a tenant. Raises its errors. Raises SandboxUnavailable: the process cannot
    start another thread.
    """
    threads = _of_loops.setdefault(asyncio.get_running_loop(), TenantThreads())
    return await threads.run(tenant, partial(work, *args, **options))


def _retrieve(running: "asyncio.Future[Any]") -> None:
    """Read the error of work whose caller was cancelled. Without this, asyncio prints a warning."""
    if not running.cancelled():
        running.exception()
