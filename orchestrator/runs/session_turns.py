"""Items get their sessions in turn: a thousand that are begun at once neither overrun the hosts nor fail for being
many.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from contract.errors import BrokerUnavailable
from orchestrator.dispatch.placement import HostRoom
from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.5
PATIENCE_S = 300.0
"""So long no session of ours ends: then items stop waiting for sandboxes of their own, and share those that there
are.
"""

Kind = tuple[str, str | None]
"""Tenant and image: for each hosts may have room or not."""
AskRoom = Callable[[str, str | None], Awaitable[HostRoom | None]]


class SessionTurns:
    """One process's. Whoever came first is first; one that waits asks for all of its kind. A turn is waited for as long
    as it takes: what hosts have open ends, at the latest when its time to live does."""

    def __init__(self, ask_room: AskRoom, clock: Callable[[], float] = time.monotonic) -> None:
        """`ask_room`: what hosts have for a tenant's sessions of an image (Dispatcher.room)."""
        self._ask_room = ask_room
        self._clock = clock
        self._queues: defaultdict[Kind, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._opening: Counter[Kind] = Counter()
        self._changed = asyncio.Event()
        self._ended_at = clock()

    @asynccontextmanager
    async def turn(self, tenant: str, image: str | None) -> AsyncIterator[None]:
        """Around the opening of one session, when a host has room for it. Raises as `ask_room` does, but waits while
        Redis is away.
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
        """A session of ours has ended: its host tells of it in a moment."""
        self._ended_at = self._clock()

    async def _is_next(self, kind: Kind, began: float) -> bool:
        try:
            room = await self._ask_room(*kind)
        except BrokerUnavailable as error:
            # Nobody fails for what passes by the time that it is his turn.
            log.warning("room_not_known", tenant=kind[0], error=str(error))
            return False
        if room is None:
            return True
        if self._opening[kind] >= room.at_once:
            return False
        is_patient = self._clock() - max(began, self._ended_at) < PATIENCE_S
        # Those that are about to be opened may not be among what was placed yet.
        return (room.sandboxes if is_patient else room.sessions) > self._opening[kind]

    async def _wait(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()
