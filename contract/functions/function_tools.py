"""The decorator `tool`, which turns a function into a tool for programs and for workers."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pydantic import ValidationError

from toolcrew.contract.functions.call_context import CallHandler
from toolcrew.contract.functions.call_handlers import build_function_handler
from toolcrew.contract.functions.function_schemas import function_name, read_function, tool_parameters
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.registry import Tool, Validator
from toolcrew.contract.specs import ToolSpec

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class FunctionTool(Tool[CallHandler], Generic[P, R]):
    """Tool that wraps a function. A direct call runs the function without schema check, timeout or context."""

    function: Callable[P, R] = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.function)
        object.__setattr__(self, "__name__", function_name(self.function))
        object.__setattr__(self, "__doc__", inspect.getdoc(self.function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = ...,
    description: str | None = ...,
    timeout_s: float | None = ...,
    requires_permission: bool = ...,
    dangerous: bool = ...,
    read_only: bool = ...,
    idempotent: bool = ...,
    validators: Iterable[Validator] = ...,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    requires_permission: bool = False,
    dangerous: bool = False,
    read_only: bool = False,
    idempotent: bool = False,
    validators: Iterable[Validator] = (),
) -> Any:
    """Turn a sync or async function into a tool: `@tool`, or `@tool(name=..., timeout_s=...)`.

    The type hints become the JSON Schema of the parameters. The Google-style docstring gives the descriptions. A
    parameter annotated CallContext receives the context, and the model does not see it. Raises TypeError, with function
    and parameter, for a parameter without a JSON form.
    """

    def decorate(target: Callable[..., Any]) -> FunctionTool[..., Any]:
        if not callable(target):
            raise TypeError(f"@tool needs a function, not {target!r}. Pass options by name: @tool(name='search')")
        _refuse_generators(target)
        shape = read_function(target, name=name)
        spec = checked_spec(
            shape.name,
            description=description or shape.docstring.description or f"The function {shape.name}.",
            parameters=tool_parameters(shape),
            timeout_s=timeout_s,
            requires_permission=requires_permission,
            dangerous=dangerous,
            read_only=read_only,
            idempotent=idempotent,
        )
        return FunctionTool(spec, build_function_handler(target, shape.name), tuple(validators), function=target)

    return decorate if function is None else decorate(function)


def checked_spec(name: str, **fields: Any) -> ToolSpec:
    """Return the spec of a program's or an operator's tool. Raises TypeError for a name that model servers refuse, and
    for invalid fields.
    """
    if not _NAME.fullmatch(name):
        sentence = (
            "model servers accept only names of 1 to 64 letters (a-z, A-Z), digits, '_' and '-'. Choose such a name "
            "with @tool(name=...)"
        )
        raise TypeError(f"tool {name!r}: {sentence}")
    try:
        return ToolSpec(name=name, pool="local", **fields)
    except ValidationError as error:
        raise TypeError(f"tool '{name}': {describe_invalid(error)}") from error


def _refuse_generators(function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"tool '{function_name(function)}' is a generator. Return the whole result instead of yielding parts."
        )
