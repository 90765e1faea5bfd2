"""What a function that runs as a tool is told beside its arguments: whose call it is, configuration, folder, model, state."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from orchestrator.functions.session_state import MemoryState, SessionState

__all__ = ["CallContext", "LocalHandler", "MemoryState", "ModelLike", "SessionState"]

T = TypeVar("T")


@runtime_checkable
class ModelLike(Protocol):
    """The model in use, as tools see it: its name, and one whole reply to a prompt or messages."""

    @property
    def name(self) -> str: ...

    async def complete(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class CallContext:
    """One call's surroundings. `config` is read-only; `state` belongs to the session and outlives the call.

    A function gets it in a parameter annotated `CallContext`; that parameter is no part of what the model sees.
    """

    call_id: str
    tenant: str = "default"
    run: str | None = None
    session: str | None = None
    cwd: str = "/workspace"
    config: Mapping[str, Any] = field(default_factory=dict)
    model: ModelLike | None = None
    """None when the program that runs the tools named none."""
    state: SessionState = field(default_factory=MemoryState)
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False, compare=False)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """For functions that are not async: run `coroutine` (of `state` or `model`) on the program's loop and give what it gives.

        Raises RuntimeError inside the loop itself, which would wait for ever: await it there instead.
        """
        if self.loop is None or _is_running_here():
            coroutine.close()
            raise RuntimeError("CallContext.wait is for plain functions, which run in a thread; in an async function use await")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


LocalHandler = Callable[[dict[str, Any], CallContext], Any]
"""What runs a tool in this process: (arguments, context) -> any value, or an awaitable of one. Plain ones run in a thread."""


def _is_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
