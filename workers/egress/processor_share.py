"""The part of the proxy's processor time that one tenant may use.

One event loop serves all tenants of a host, and a program decides how much work its connections make: pieces of one
byte, many new connections, long secrets. So the processor time of each step of a connection counts for its tenant. A
tenant that has used its share waits; all of its connections wait together, and take their next steps one at a time.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
SHARE = 0.5
"""Maximum part of the processor time that one tenant uses in the long run."""
BURST_S = 0.25
"""Processor time, divided by the share, that a tenant may use at once after a pause."""
_current: ContextVar["ProcessorShare | None"] = ContextVar("processor_share", default=None)


class ProcessorShare:
    """The processor time of one tenant, in the clock's seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self.processor = processor
        self._paid_at = clock()
        self._turn = asyncio.Lock()

    @property
    def is_used_up(self) -> bool:
        """Return whether the tenant must wait before its next step."""
        return self._turn.locked() or self.wait_s > 0

    @property
    def wait_s(self) -> float:
        """Return the time until the tenant may take its next step."""
        return max(0.0, self._paid_at - BURST_S - self._clock())

    def charge(self, seconds: float) -> None:
        """Count processor time."""
        self._paid_at = max(self._paid_at, self._clock()) + seconds / SHARE

    async def wait(self) -> None:
        """Wait until the tenant may take its next step."""
        async with self._turn:
            while (pause := self.wait_s) > 0:  # noqa: ASYNC110
                # The share depends only on time, so there is no event to wait for.
                await asyncio.sleep(pause)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work, and the tasks that it starts with `start_task`, at the expense of this share."""
        _current.set(self)
        result: T = await _Metered(work, self)
        return result


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task of the connection that runs now, at the expense of its tenant."""
    share = _current.get()
    return asyncio.ensure_future(work if share is None else share.run(work))


class _Metered:
    """Runs a coroutine step by step. A step lasts until the coroutine waits for something."""

    def __init__(self, work: Coroutine[Any, Any, T], share: ProcessorShare) -> None:
        self._work = work
        self._share = share

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._work.send, None)
        try:
            while True:
                try:
                    if self._share.is_used_up:
                        yield from self._share.wait().__await__()
                except asyncio.CancelledError as error:
                    step = partial(self._work.throw, error)
                started = self._share.processor()
                try:
                    waits_for = step()
                except StopIteration as end:
                    return end.value
                finally:
                    self._share.charge(self._share.processor() - started)
                step = partial(self._work.send, None)
                try:
                    yield waits_for
                except BaseException as error:  # noqa: BLE001 - an interruption of any kind belongs to the coroutine
                    step = partial(self._work.throw, error)
        finally:
            self._work.close()
