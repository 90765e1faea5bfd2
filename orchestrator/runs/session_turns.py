"""Opens the sessions of items in turn, as hosts have room: a thousand items that start at once neither overload the
hosts nor fail.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from contract.errors import BrokerUnavailable
from orchestrator.dispatch.placement import HostCapacity
from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.5
MAX_STALL_S = 300.0
"""When no session of this process has ended for so long, items no longer wait for a free sandbox: hosts that suspend
idle sessions can still open more.
"""

Kind = tuple[str, str | None]
"""Tenant and image: hosts may have room for one kind and not for another."""
AskRoom = Callable[[str, str | None], Awaitable[HostCapacity | None]]


class SessionTurns:
    """The turns of one process, first come first served for each kind. A turn never times out: open sessions end, at
    the latest at the end of their time to live.
    """

    def __init__(self, ask_room: AskRoom, clock: Callable[[], float] = time.monotonic) -> None:
        """`ask_room`: returns the room that hosts have for a tenant's sessions of an image (Dispatcher.capacity)."""
        self._ask_room = ask_room
        self._clock = clock
        self._queues: defaultdict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._opening: Counter[Kind] = Counter()
        self._changed = asyncio.Event()
        self._ended_at = clock()

    @asynccontextmanager
    async def turn(self, tenant: str, image: str | None) -> AsyncIterator[None]:
        """Wait until a host has room, then wrap the opening of one session. Raises as `ask_room` does, but waits while
        Redis does not answer.
        """
        kind = (tenant, image)
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

    def note_end(self) -> None:
        """Note that a session of this process has ended. Its host reports the room a moment later."""
        self._ended_at = self._clock()

    async def _is_next(self, kind: Kind, began: float) -> bool:
        try:
            room = await self._ask_room(*kind)
        except BrokerUnavailable as error:
            # Redis may answer again before it is the item's turn: no item fails for this.
            log.warning("room_not_known", tenant=kind[0], error=str(error))
            return False
        if room is None:
            return True
        if self._opening[kind] >= room.at_once:
            return False
        is_moving = self._clock() - max(began, self._ended_at) < MAX_STALL_S
        # Sessions that are being opened here may not be counted by the hosts yet.
        return (room.sandboxes if is_moving else room.sessions) > self._opening[kind]

    async def _wait(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
