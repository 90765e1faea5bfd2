"""Work beside the event loop's own: in threads that nobody has to wait for, and several pieces at once of which none
keeps the others.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import structlog

from contract.errors import SandboxUnavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """A thread of its own, which the end of the process does not wait for: the pools of the standard library do, and an
    engine or a disk can hang.

    Raises SandboxUnavailable when the host gives none.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T has it

    def go() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # the thread's edge: whoever waits gets it
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            log.debug("work_outlived_its_loop", thread=name)

    try:
        threading.Thread(target=go, name=name, daemon=True).start()
    except RuntimeError as error:
        raise SandboxUnavailable(
            f"this host lets sandboxd have no more threads ({error}): raise its limit of tasks"
        ) from error
    return future


async def settle(work: Iterable[Awaitable[Any]]) -> None:
    """All of it, whatever some of it raises. What the engine or the disk refused is tried again later; anything else is
    a bug, and loud.
    """
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, SandboxUnavailable):
            log.warning("work_not_done", error=str(result))
        elif isinstance(result, Exception):
            log.error("work_failed", exc_info=result)
