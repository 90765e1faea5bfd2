"""Work that continues after the request that started it. The process waits for it before it closes its connections to
Redis.
"""

import asyncio
from collections.abc import Coroutine

from store.tasks import cancel_all


class BackgroundTasks:
    """The background tasks of one process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Start a task. `work` raises nothing."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, within_s: float) -> None:
        """Wait until all tasks are done; cancel those that take longer."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            await cancel_all(late)
