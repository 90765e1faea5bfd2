"""An answer that is good for a moment: however many ask meanwhile, it is looked for once."""

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from store.tasks import SharedReads

T = TypeVar("T")


class Fresh(Generic[T]):
    """What was found within the last `fresh_s` seconds. `clock`: monotonic seconds."""

    def __init__(self, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s = fresh_s
        self._clock = clock
        self._reads = SharedReads[T]()
        self._kept: tuple[T, float] | None = None

    async def get(self, look: Callable[[], Awaitable[T]]) -> T:
        """What there is, else what `look` gives. Raises what it raises, which is not kept."""
        if self._kept is not None and self._clock() - self._kept[1] < self._fresh_s:
            return self._kept[0]
        return await self._reads.read("", lambda: self._look(look))

    async def _look(self, look: Callable[[], Awaitable[T]]) -> T:
        found = await look()
        self._kept = (found, self._clock())
        return found
