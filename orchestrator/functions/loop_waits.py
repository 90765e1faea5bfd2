"""Plain functions in threads that wait for coroutines of the program's loop."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from contract.functions.call_context import refuse_to_wait

T = TypeVar("T")


@dataclass(frozen=True)
class LoopRunner:
    """The `runner` of a CallContext in this process: coroutines run on `loop`, and the thread that gave them waits."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Raises RuntimeError inside a loop, which would wait for ever."""
        if _is_running_here():
            raise refuse_to_wait(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


def _is_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
