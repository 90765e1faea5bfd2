"""Cancellations that cannot get lost: a wait of the Redis client swallows one that comes in the same moment as its answer."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

AGAIN_S = 0.1


def is_being_cancelled() -> bool:
    """Whether somebody cancels this task; False: something that it waited for was cancelled, or ran out of time."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def check_cancelled() -> None:
    """Raises CancelledError in a task that has been cancelled and goes on all the same. For the top of loops without an end."""
    if is_being_cancelled():
        raise asyncio.CancelledError


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"], is_ending: Callable[["asyncio.Task[Any]"], bool] = lambda _: False) -> None:
    """Cancel tasks until they are done, each by what it likes to end with. `is_ending`: one that has heard it, and only cleans up."""
    pending = set(tasks)
    while pending:
        for task in pending:
            if not is_ending(task):
                task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
