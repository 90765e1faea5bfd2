"""Shared state with one background job: in one event loop, or in threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any


class AsyncMonitor:
    """A lock whose holder can wait for a change, and a task."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        await self._condition.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Every holder may have changed something.
        self._condition.notify_all()
        self._condition.release()

    async def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait, without the lock, until a condition is true. Return false at the time limit."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._condition.wait_for(is_true)
        except TimeoutError:
            return is_true()
        return True

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the job, once."""
        if self._task is None:
            self._task = asyncio.create_task(work())

    async def stop(self) -> None:
        """End the job."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class Monitor:
    """A lock whose holder can wait for a change, and a thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.notify_all()
        self._condition.release()

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait, without the lock, until a condition is true. Return false at the time limit."""
        return self._condition.wait_for(is_true, timeout_s)

    def start(self, work: Callable[[], None]) -> None:
        """Start the job, once. It does not keep the program alive."""
        if self._thread is None:
            self._thread = threading.Thread(target=work, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Leave the job to its end, which follows when its connection is closed."""
