"""Wait for conditions that give a test no event, for example the state of another process. Tests that can receive an
event (an asyncio.Event, the exit of a process, a blocking read) use the event instead.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import pytest

SOON_S = 90.0
"""Limit for something that an idle machine does at once, in seconds. Only a failed test waits as long: a smaller limit
would test how busy the machine is.
"""
IN_FORCE_S = 2.0
"""Seconds within which a switch, a policy or a key takes effect in every process, as the documentation promises."""
PAUSE_S = 0.05
"""Default time between two checks of a condition, in seconds."""


def wait_until(
    condition: Callable[[], Any], within_s: float, expectation: str | Callable[[], str], pause_s: float = PAUSE_S
) -> Any:
    """Return the first true result of the condition. Fails the test at the deadline with `expectation`; a callable `expectation` is
    called only then.
    """
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            _fail(within_s, expectation)
        time.sleep(pause_s)
    return result


async def wait_until_async(
    condition: Callable[[], Any],
    within_s: float,
    expectation: str | Callable[[], str],
    pause_s: float = PAUSE_S,
    accepts: Callable[[Any], Any] = bool,
) -> Any:
    """Wait as `wait_until` does, but without blocking the event loop. Returns the first result that `accepts` accepts.
    A coroutine that the condition returns is awaited, at most until the deadline. A condition that is a plain function
    runs in a thread.
    """
    deadline = time.monotonic() + within_s
    while True:
        result = await asyncio.to_thread(condition)
        if inspect.isawaitable(result):
            limit = asyncio.timeout(deadline - time.monotonic())
            try:
                async with limit:
                    result = await result
            except TimeoutError:
                if limit.expired():
                    _fail(within_s, expectation)
                raise
        if accepts(result):
            return result
        if time.monotonic() > deadline:
            _fail(within_s, expectation)
        await asyncio.sleep(pause_s)


async def until(condition: Callable[[], Any], within_s: float = SOON_S, pause_s: float = 0.005) -> None:
    """Wait until a quick condition is true that gives no event. The condition runs in the event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            _fail(within_s, "see the condition above")
        await asyncio.sleep(pause_s)


async def assert_in_force(has_changed: Callable[[], Awaitable[bool]]) -> None:
    """Repeat the check until it sees a change that was made before. Fails if a check that began IN_FORCE_S after now
    does not see the change. It does not matter how long a check takes.
    """
    changed_at = time.monotonic()
    while True:
        began_at = time.monotonic()
        if await has_changed():
            return
        assert began_at - changed_at < IN_FORCE_S
        await asyncio.sleep(PAUSE_S)


def _fail(within_s: float, expectation: str | Callable[[], str]) -> NoReturn:
    pytest.fail(f"not within {within_s:g} s: {expectation if isinstance(expectation, str) else expectation()}")
