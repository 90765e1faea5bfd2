"""Context of a call for a function that runs as a tool: ids, configuration, working directory, model and state."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.session_state import NoState, SessionState

T = TypeVar("T")


@runtime_checkable
class ModelAdapter(Protocol):
    """Model of the caller, as tools use it. `await complete(...)` returns one whole reply to a prompt or messages."""

    @property
    def name(self) -> str: ...

    def complete(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]: ...


class CoroutineRunner(Protocol):
    """Runs a coroutine on behalf of a function that is not async, and returns its result. Raises RuntimeError where
    this would deadlock.
    """

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


@dataclass(frozen=True)
class CallContext:
    """Context of one call. `config` is read-only; `state` belongs to the session and outlives the call.

    A function receives the context in a parameter that is annotated `CallContext`. The model does not see that
    parameter.
    """

    call_id: str
    tenant: str = "default"
    run: str | None = None
    session: str | None = None
    cwd: str = "/workspace"
    config: Mapping[str, Any] = field(default_factory=dict)
    model: ModelAdapter | None = None
    """Model of the caller, or None if the program that runs the tools has no model."""
    state: SessionState = field(default_factory=NoState)
    runner: CoroutineRunner | None = field(default=None, repr=False, compare=False)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of `state` or `model` from a plain function, and return its result.

        Raises RuntimeError in an async function, where this would deadlock. Use await there.
        """
        if self.runner is None:
            raise refuse_to_wait(coroutine)
        return self.runner(coroutine)

    def require_model(self) -> ModelAdapter:
        """Return the model. Raises ToolFailure(CONFIG_MISSING) if the caller has no model."""
        if self.model is None:
            raise ToolFailure(
                ErrorCode.CONFIG_MISSING,
                "this tool needs a model, but its caller has none. Call it in a run of an agent.",
            )
        return self.model


CallHandler = Callable[[dict[str, Any], CallContext], Any]
"""Handler of a function tool: (arguments, context) -> any value, or an awaitable of any value."""


@dataclass(frozen=True)
class FunctionHandler:
    """Handler that calls a user's function and records whether that function is async. The signature of the handler
    does not show this.
    """

    run: CallHandler
    returns_coroutine: bool

    def __call__(self, arguments: dict[str, Any], context: CallContext) -> Any:
        return self.run(arguments, context)


def refuse_to_wait(coroutine: Coroutine[Any, Any, Any]) -> RuntimeError:
    """Return the error of a `wait` that would deadlock. Closes the coroutine, because no code will await it."""
    coroutine.close()
    return RuntimeError("CallContext.wait was called in an async function: use await there")
