"""Containers that may still show up after their start was given up: asked for by name until they are gone, or surely never came."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from contract.errors import SandboxUnavailable

log = structlog.get_logger(__name__)

PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before each try; the last one for ever."""
ABSENT_ENOUGH: Final = 5
"""Never made: not there this many times in a row, while the engine answered. What comes later still is found by its deadline."""


class LateStarts:
    """Removes in the background. `remove`: by name; whether it was there; raises SandboxUnavailable."""

    def __init__(self, remove: Callable[[str], Awaitable[bool]], pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._remove = remove
        self._pauses_s = pauses_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """How many are still looked for."""
        return len(self._tasks)

    def forget(self, name: str) -> None:
        """Look for it from now on; once more from the beginning when it is looked for already."""
        if name in self._tasks:
            self._tasks.pop(name).cancel()
        task = asyncio.get_running_loop().create_task(self._look(name))
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._drop(name, done))

    def close(self) -> None:
        """Look no more."""
        for task in list(self._tasks.values()):
            task.cancel()

    def _drop(self, name: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _look(self, name: str) -> None:
        absent, turn = 0, 0
        while absent < ABSENT_ENOUGH:
            await asyncio.sleep(self._pauses_s[min(turn, len(self._pauses_s) - 1)])
            turn += 1
            try:
                was_there = await self._remove(name)
            except SandboxUnavailable:
                absent = 0
                continue
            if was_there:
                log.info("late_container_removed", container=name)
                return
            absent += 1
