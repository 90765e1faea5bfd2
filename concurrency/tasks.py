"""Tasks of the event loop: reliable cancellation, shared reads, backoff, and work in threads."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from toolcrew.contract.errors import BrokerUnavailable, SandboxUnavailable
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

CANCEL_INTERVAL_S = 0.1
LONGEST_PAUSE_S = 2.0
OUTAGE_S = 120.0
"""Seconds for which work that is not urgent waits for an unavailable Redis before the work fails."""


def is_being_cancelled() -> bool:
    """Return whether the current task is being cancelled. Call it after a CancelledError: False means that only an
    operation that the task awaited was cancelled or timed out.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def check_cancelled() -> None:
    """Raise CancelledError in a task that was cancelled and still runs. Call this function at the start of each
    iteration of an endless loop.
    """
    if is_being_cancelled():
        raise asyncio.CancelledError


async def cancel_all(
    tasks: Iterable["asyncio.Task[Any]"], is_ending: Callable[["asyncio.Task[Any]"], bool] = lambda _: False
) -> None:
    """Cancel tasks repeatedly until they are done. One cancellation can be lost, for example in `asyncio.wait_for`
    before Python 3.12. `is_ending`: returns whether the task has noticed the cancellation and only cleans up.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            if not is_ending(task):
                task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)


def begin_shared(work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a task that does not belong to the call or run that starts it. The task has an empty context: its log
    lines do not name the call, and it keeps no objects of the call alive.
    """
    return asyncio.create_task(work, name=name, context=contextvars.Context())


class SharedReads(Generic[T]):
    """Lets concurrent callers that want to read the same subject share one read. Cancelling one caller does not cancel
    the read for the others.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[T]] = {}

    async def read(self, subject: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, or of a read of the same subject that is in progress. Raises the errors of the
        read.
        """
        task = self._running.get(subject)
        if task is None:
            task = self._running[subject] = begin_shared(work(), "shared-read")
            task.add_done_callback(partial(self._end, subject))
        return await asyncio.shield(task)

    def _end(self, subject: str, task: "asyncio.Task[T]") -> None:
        self._running.pop(subject, None)
        if not task.cancelled():
            # Reading the exception prevents asyncio's warning if all callers have been cancelled.
            task.exception()


class Backoff:
    """Pauses between retries. Each pause is longer than the one before. The pauses end `limit_s` seconds after the
    first one began.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until: float | None = None
        self._pause_s = 0.0

    async def wait(self) -> bool:
        """Wait, and return True. Return False without waiting if the time is used up."""
        now = time.monotonic()
        self._until = self._until or now + self._limit_s
        if now + self._pause_s > self._until:
            return False
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or 0.05)
        return True


async def retry_until_available(work: Callable[[], Awaitable[T]], limit_s: float = OUTAGE_S) -> T:
    """Return the result of `work`. Repeat `work` while Redis does not answer. Raises BrokerUnavailable after `limit_s`
    seconds.
    """
    backoff = Backoff(limit_s)
    while True:
        try:
            return await work()
        except BrokerUnavailable as error:
            log.warning("redis_not_available", error=str(error))
            if not await backoff.wait():
                raise


def in_thread(work: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Run blocking work in a thread of its own. The end of the process does not wait for the thread, because an engine
    or a disk can hang. The thread pools of the standard library would wait.

    Raises SandboxUnavailable: the process cannot start another thread on this host.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only if T allows it

    def go() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # the caller gets the error
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            log.debug("thread_ended_after_loop", thread=name)

    try:
        threading.Thread(target=go, name=name, daemon=True).start()
    except RuntimeError as error:
        raise SandboxUnavailable(
            f"the process cannot start another thread on this host ({error}): raise its limit of tasks"
        ) from error
    return future
