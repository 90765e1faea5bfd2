"""One read for all who want the same at the same time, so that a busy process asks Redis once and not once a call."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from orchestrator.shared_tasks import begin_shared

T = TypeVar("T")


class SharedReads(Generic[T]):
    """The reads that are on their way, by what they read. A cancelled caller takes nobody's answer away."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[T]] = {}

    async def read(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` gives, or what the one gives that reads the same already. Raises what it raises."""
        task = self._running.get(what)
        if task is None:
            task = self._running[what] = begin_shared(work(), "shared-read")
            task.add_done_callback(partial(self._end, what))
        return await asyncio.shield(task)

    def _end(self, what: str, task: "asyncio.Task[T]") -> None:
        self._running.pop(what, None)
        if not task.cancelled():
            # Looked at, so that nothing is reported when all who asked have gone.
            task.exception()
