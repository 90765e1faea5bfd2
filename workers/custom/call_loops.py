"""The event loop of one call: async functions run in it, and plain ones wait in it for what is async."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from contract.errors import ErrorCode, ToolFailure
from contract.functions.call_context import refuse_to_wait

T = TypeVar("T")


class CallLoop:
    """A loop that is made when something first runs in it. At the end what still runs in it is cancelled.

    The `runner` of the call's CallContext.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> "CallLoop":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            self._runner.close()

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """What `coroutine` gives. Threads of a tool wait for each other. Raises RuntimeError within a loop, which would
        wait for ever.
        """
        if is_running_here():
            raise refuse_to_wait(coroutine)
        with self._lock:
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(coroutine)

    def run_tool(self, name: str, value: Any, limit_s: float) -> Any:
        """`value`, or what it gives when it is to be awaited. Raises ToolFailure(TIMEOUT) at the limit."""
        return self(_within(name, value, limit_s)) if inspect.isawaitable(value) else value


async def _within(name: str, value: Awaitable[T], limit_s: float) -> T:
    """The worker interrupts a call at its limit from outside; that is lost when it hits the loop between two steps of
    the tool.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await value
    except TimeoutError:
        if not limit.expired():
            raise
        raise ToolFailure(
            ErrorCode.TIMEOUT, f"{name} did not end within its limit of {limit_s:g} s and was stopped"
        ) from None


def is_running_here() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
