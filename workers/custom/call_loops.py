"""The event loop of one call. Async functions run in it, and plain functions wait in it for async results."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import refuse_to_wait

T = TypeVar("T")


class CallLoop:
    """An event loop that is created when the call runs its first coroutine.

    At the end of the call, coroutines that still run are cancelled. The loop is the `runner` of the call's CallContext.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> "CallLoop":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            self._runner.close()

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Run `coroutine` to its end and return its result. Calls from several threads of a tool run one after the
        other.

        Raises RuntimeError inside a running loop, where the wait would never end.
        """
        if is_running_here():
            raise refuse_to_wait(coroutine)
        with self._lock:
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(coroutine)

    def run_tool(self, name: str, value: Any, limit_s: float) -> Any:
        """Return `value`, or its result if it is awaitable. Raises ToolFailure(TIMEOUT) at the limit."""
        return self(_within(name, value, limit_s)) if inspect.isawaitable(value) else value


async def _within(name: str, value: Awaitable[T], limit_s: float) -> T:
    """Return the result of `value`. Raises ToolFailure(TIMEOUT) at the limit.

    The worker's own interrupt at the limit is lost when it arrives in the loop between two steps of the tool.
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
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
