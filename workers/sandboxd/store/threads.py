"""The threads of one store: a disk or a service that hangs holds up this store alone, and each of its callers only for so long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from workers.sandboxd.threads import in_thread

ANSWER_S = 60.0
"""For one piece of work: a read, a write, a list."""
_AT_ONCE = 16

T = TypeVar("T")


class StoreThreads:
    """So many pieces of work at a time; one that hangs keeps its turn until it ends."""

    def __init__(self, answer_s: float = ANSWER_S, at_once: int = _AT_ONCE) -> None:
        self._answer_s = answer_s
        self._turns = asyncio.Semaphore(at_once)

    async def run(self, work: Callable[[], T], within_s: float | None = None) -> T:
        """What blocking work gives. Raises what it raises, and TimeoutError when it has not ended in time: nobody can end it, it may do so later."""
        limit_s = within_s or self._answer_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._turns.acquire()
                return await asyncio.shield(self._start(work))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no answer within {limit_s:g} s") from error

    def _start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        try:
            running = in_thread(work, "store")
        except BaseException:
            self._turns.release()
            raise
        running.add_done_callback(self._give_back)
        return running

    def _give_back(self, running: "asyncio.Future[T]") -> None:
        self._turns.release()
        running.exception()  # whoever asked may have left: then nobody else takes it
