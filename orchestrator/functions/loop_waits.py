"""Lets plain functions in threads wait for coroutines of the program's event loop."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from toolcrew.contract.functions.call_context import refuse_to_wait

T = TypeVar("T")


@dataclass(frozen=True)
class LoopRunner:
    """The `runner` of a CallContext in this process.

    Coroutines run on `loop` while the calling thread waits.
    """

    loop: asyncio.AbstractEventLoop

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Run the coroutine and return its result. Raises RuntimeError inside an event loop, which would deadlock."""
        if _is_running_here():
            raise refuse_to_wait(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


def _is_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
