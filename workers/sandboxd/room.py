"""How many containers this host may have at a time, counted from before their start until their removal is confirmed."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from contract.errors import SandboxUnavailable

ROOM_WAIT_S = 10.0
"""How long a session waits for a place that others may give up."""
_LOOK_S = 0.1


class Room:
    """Places for containers. `make_room` is asked to give one up, and tells whether it did."""

    def __init__(self, limit: int, wait_s: float = ROOM_WAIT_S) -> None:
        self.limit = limit
        self.taken = 0
        self._wait_s = wait_s
        self.make_room: Callable[[], Awaitable[bool]] | None = None

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
            if self.make_room is not None and await self.make_room():
                continue
            if time.monotonic() >= until:
                raise SandboxUnavailable(
                    f"this host already holds {self.limit} sandboxes, and all of them work: close sessions, add a host, "
                    "or raise TOOLCREW_MAX_SANDBOXES"
                )
            await asyncio.sleep(_LOOK_S)

    def give_back(self) -> None:
        self.taken -= 1
