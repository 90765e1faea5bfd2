"""What a function that runs as a tool is told beside its arguments: whose call it is, configuration, folder, model,
state.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from contract.errors import ErrorCode, ToolFailure
from contract.functions.session_state import NoState, SessionState

T = TypeVar("T")


@runtime_checkable
class ModelAdapter(Protocol):
    """The model in use, as tools see it: its name, and one whole reply to a prompt or messages. `complete` is
    awaited.
    """

    @property
    def name(self) -> str: ...

    def complete(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]: ...


class CoroutineRunner(Protocol):
    """Runs a coroutine to its end for a plain function, and gives what it gives. Raises RuntimeError where that would
    wait for ever.
    """

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


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
    model: ModelAdapter | None = None
    """None when the program that runs the tools named none."""
    state: SessionState = field(default_factory=NoState)
    runner: CoroutineRunner | None = field(default=None, repr=False, compare=False)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """For functions that are not async: run `coroutine` (of `state` or `model`) and give what it gives.

        Raises RuntimeError in an async function, which would wait for ever: await it there instead.
        """
        if self.runner is None:
            raise refuse_to_wait(coroutine)
        return self.runner(coroutine)

    def require_model(self) -> ModelAdapter:
        """The model, for tools that cannot do without. Raises ToolFailure(CONFIG_MISSING) with what to do when there is
        none.
        """
        if self.model is None:
            raise ToolFailure(
                ErrorCode.CONFIG_MISSING,
                "this tool asks a model, and its caller has none: call it within an agent's run",
            )
        return self.model


CallHandler = Callable[[dict[str, Any], CallContext], Any]
"""What runs a tool made of a function: (arguments, context) -> any value, or an awaitable of one."""


@dataclass(frozen=True)
class KnownHandler:
    """A handler that knows whether it gives a coroutine: it calls somebody else's function, which its own signature
    cannot tell.
    """

    run: CallHandler
    gives_coroutine: bool

    def __call__(self, arguments: dict[str, Any], context: CallContext) -> Any:
        return self.run(arguments, context)


def refuse_to_wait(coroutine: Coroutine[Any, Any, Any]) -> RuntimeError:
    """The error of a `wait` that could never end. The coroutine is closed: nobody will await it."""
    coroutine.close()
    return RuntimeError("CallContext.wait is for plain functions; in an async function use await")
