"""How many containers this host may have at a time, counted from before their start until their removal is confirmed."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from contract.errors import SandboxUnavailable

ROOM_WAIT_S = 10.0
"""How long a session waits for a place that others may give up."""
GIVE_UP_S = 10.0
"""And for one that is about to give its place up."""
_LOOK_S = 0.1


class Room:
    """Places for containers. `make_room` is asked to give one up, and tells whether it did."""

    def __init__(self, limit: int, wait_s: float = ROOM_WAIT_S) -> None:
        self.limit = limit
        self.taken = 0
        self._wait_s = wait_s
        self.make_room: Callable[[], Awaitable[bool]] | None = None
        self._making: set[asyncio.Future[bool]] = set()

    @property
    def is_full(self) -> bool:
        return self.taken >= self.limit

    def try_take(self) -> bool:
        """A place at once, or none: for what nobody waits for."""
        if self.is_full:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """A place, for which others may have to give theirs up. Raises SandboxUnavailable when nobody can in time."""
        until = time.monotonic() + self._wait_s
        while not self.try_take():
            if await self._has_made_room():
                continue
            if time.monotonic() >= until:
                raise SandboxUnavailable(
                    f"this host already holds {self.limit} sandboxes, and all of them work: close sessions, add a host, "
                    "or raise TOOLCREW_MAX_SANDBOXES"
                )
            await asyncio.sleep(_LOOK_S)

    def give_back(self) -> None:
        self.taken -= 1

    async def _has_made_room(self) -> bool:
        """Who gives a place up does so to the end, also when it takes longer than anybody waits: half of it done is a session's state lost."""
        if self.make_room is None:
            return False
        making = asyncio.ensure_future(self.make_room())
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        await asyncio.wait({making}, timeout=GIVE_UP_S)
        return making.done() and making.result()
