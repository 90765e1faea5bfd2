"""Work outside of the event loop's own tasks: blocking work in daemon threads, and groups of tasks of which one failure
does not stop the others.
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
    """Run blocking work in a daemon thread and return a future of its result. The thread is not from a pool: the
    interpreter waits for pool threads at exit, and an engine or a disk can hang.

    Raises SandboxUnavailable when the host allows no more threads.
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

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # the caller that awaits the future gets the error
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            log.debug("work_outlived_its_loop", thread=name)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise SandboxUnavailable(
            f"this host lets sandboxd have no more threads ({error}): raise its limit of tasks"
        ) from error
    return future


async def settle(work: Iterable[Awaitable[Any]]) -> None:
    """Wait for every piece of work, even if one fails. A refusal of the engine or the disk is logged as a warning,
    because the caller tries again later. Any other exception is a bug and is logged with its traceback.
    """
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, SandboxUnavailable):
            log.warning("work_not_done", error=str(result))
        elif isinstance(result, Exception):
            log.error("work_failed", exc_info=result)
