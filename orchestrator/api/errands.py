"""Work that outlasts the request that began it, and that the process ends before it lets go of Redis."""

import asyncio
from collections.abc import Coroutine

from store.tasks import cancel_all


class Errands:
    """Of one process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """`work` raises nothing."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, within_s: float) -> None:
        """All that was begun is done, or has been cancelled because it took longer."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            await cancel_all(late)
