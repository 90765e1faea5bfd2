"""Opens the sessions of items one after another, when hosts have free capacity. A thousand items that start at once
neither overload the hosts nor fail.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.orchestrator.dispatch.placement import HostCapacity
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

CHECK_INTERVAL_S = 0.5
MAX_STALL_S = 300.0
"""Seconds after which items no longer wait for a free sandbox, if no session of this process has ended in this time.
The session is then opened without a free sandbox, because hosts can suspend idle sessions.
"""

Kind = tuple[str, str | None]
"""Kind of a session: tenant and image. Hosts may have capacity for one kind and none for another."""
FindCapacity = Callable[[str, str | None], Awaitable[HostCapacity | None]]


class SessionQueue:
    """Queue of one process for opening sessions, in the order of arrival for each kind of session.

    The wait has no timeout: every open session ends, at the latest at the end of its time to live.
    """

    def __init__(self, find_capacity: FindCapacity, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the queue. `find_capacity`: returns the free capacity of the hosts for sessions of a tenant and an
        image (Dispatcher.capacity).
        """
        self._find_capacity = find_capacity
        self._clock = clock
        self._queues: defaultdict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._opening: Counter[Kind] = Counter()
        self._changed = asyncio.Event()
        self._ended_at = clock()

    @asynccontextmanager
    async def enter(self, tenant: str, image: str | None) -> AsyncIterator[None]:
        """Context manager that waits until a host has free capacity. Its block then opens one session. Waits while
        Redis does not answer. Raises the other exceptions of `find_capacity`.
        """
        kind = (tenant, image)
        # The lock keeps the order of arrival. It is released before the session is opened, so that sessions open in
        # parallel.
        async with self._queues[kind]:
            began = self._clock()
            while not await self._is_next(kind, began):
                await self._wait()
            self._opening[kind] += 1
        try:
            yield
        finally:
            self._opening[kind] -= 1
            self._changed.set()

    def record_end(self) -> None:
        """Note that a session of this process has ended. Its host reports the free capacity shortly afterwards."""
        self._ended_at = self._clock()

    async def _is_next(self, kind: Kind, began: float) -> bool:
        """Return whether the next session of this kind may open now."""
        try:
            has_room = await self._find_capacity(*kind)
        except BrokerUnavailable as error:
            # Redis may answer again before the item's turn, so no item fails for this error.
            log.warning("capacity_not_read", tenant=kind[0], error=str(error))
            return False
        if has_room is None:
            return True
        if self._opening[kind] >= has_room.at_once:
            return False
        is_moving = self._clock() - max(began, self._ended_at) < MAX_STALL_S
        # Hosts may not yet count the sessions that this process is opening, so this process subtracts them.
        return (has_room.sandboxes if is_moving else has_room.sessions) > self._opening[kind]

    async def _wait(self) -> None:
        """Wait until a session has opened, or for CHECK_INTERVAL_S."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_INTERVAL_S):
                await self._changed.wait()
