"""Tools of a program's own: the decorator `tool`, and `as_tool` for whatever else can be run by name."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pydantic import ValidationError

from contract.registry import Tool, Validator
from contract.specs import ToolSpec
from orchestrator.functions.call_context import LocalHandler
from orchestrator.functions.call_handlers import build_execute_handler, build_function_handler
from orchestrator.functions.function_schemas import function_name, read_function, tool_parameters
from orchestrator.functions.json_schemas import plain_schema
from orchestrator.functions.langchain_shape import (
    base_tool_schema,
    build_base_tool_handler,
    build_langchain_handler,
    is_base_tool,
    is_langchain_shaped,
    langchain_schema,
    schema_of,
)
from orchestrator.functions.openai_tools import convert_to_openai_tool

__all__ = ["FunctionTool", "LocalTool", "as_tool", "convert_to_openai_tool", "tool"]

P = ParamSpec("P")
R = TypeVar("R")

LocalTool = Tool[LocalHandler]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FLAGS = ("requires_permission", "dangerous", "read_only", "idempotent")


@dataclass(frozen=True)
class FunctionTool(Tool[LocalHandler], Generic[P, R]):
    """A tool made of a function. Called, it is the function itself: no schema, no limit, no context of its own."""

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
    """Make a tool of a function, sync or async: `@tool`, or `@tool(name=..., timeout_s=...)`.

    Its type hints become the parameters' JSON Schema, its Google-style docstring their descriptions; a parameter annotated CallContext is
    filled in and not shown. Raises TypeError, naming function and parameter, for a signature that no model could fill in.
    """

    def decorate(target: Callable[..., Any]) -> FunctionTool[..., Any]:
        if not callable(target):
            raise TypeError(f"@tool decorates a function, not {target!r}; its options go by name: @tool(name='search')")
        _refuse_generators(target)
        shape = read_function(target, name=name)
        spec = _checked_spec(
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


def as_tool(value: Any) -> LocalTool:
    """Make a tool of `value`: a Tool (given back as it is), a function, an object or dict with name, description, parameters and
    execute(args[, context]), an object with `_run` or `run`, or anything in LangChain's shape.

    Raises TypeError that says what is missing or does not fit.
    """
    if isinstance(value, Tool):
        return value
    try:
        return _made_of(value)
    except TypeError:
        raise
    except Exception as error:  # the edge: a foreign object's attributes and schemas are computed by code of its own
        raise TypeError(f"cannot make a tool of a {type(value).__name__}: {type(error).__name__}: {error}") from error


def _made_of(value: Any) -> LocalTool:
    if isinstance(value, type):
        raise TypeError(f"{value.__name__} is a class: give an instance of it, or a function")
    if inspect.isroutine(value):
        return tool(value)
    if isinstance(value, Mapping):
        return _from_parts(value.get)
    if callable(getattr(value, "execute", None)):
        return _from_parts(lambda key: getattr(value, key, None))
    if is_langchain_shaped(value):
        schema = langchain_schema(value)
        return Tool(_spec_of(value, schema), build_langchain_handler(value, schema))
    if is_base_tool(value):
        return Tool(_spec_of(value, base_tool_schema(value)), build_base_tool_handler(value))
    if callable(value):
        return tool(value)
    kind = type(value).__name__
    raise TypeError(
        f"cannot make a tool of a {kind}: it is no function and lacks name, description and one of execute, ainvoke, invoke, _run, run"
    )


def _from_parts(part: Callable[[str], Any]) -> LocalTool:
    """Of name, description, parameters and execute, wherever they are kept."""
    name, execute = part("name"), part("execute")
    if not isinstance(name, str) or not name:
        raise TypeError("a tool needs a name: text, under 'name'")
    if not callable(execute):
        raise TypeError(f"tool '{name}': it needs a function to run, under 'execute': execute(args) or execute(args, context)")
    return Tool(_build_spec(name, part, schema_of(part("parameters") or {})), build_execute_handler(execute))


def _spec_of(value: Any, schema: dict[str, Any]) -> ToolSpec:
    return _build_spec(value.name, lambda key: getattr(value, key, None), plain_schema(schema, tell_null_as_type=True))


def _build_spec(name: str, part: Callable[[str], Any], schema: dict[str, Any]) -> ToolSpec:
    timeout_s = part("timeout_s")
    return _checked_spec(
        name,
        description=part("description") or f"The tool {name}.",
        parameters=schema,
        timeout_s=timeout_s if isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool) else None,
        **{flag: _answer(part(flag)) for flag in _FLAGS},
    )


def _checked_spec(name: str, **fields: Any) -> ToolSpec:
    """The spec of a tool in this process. Raises TypeError for a name that model servers refuse, and for what no spec takes."""
    if not _NAME.fullmatch(name):
        sentence = (
            "model servers take names of 1 to 64 letters (a-z, A-Z), digits, '_' and '-' only; give it such a name, as @tool(name=...) does"
        )
        raise TypeError(f"tool {name!r}: {sentence}")
    try:
        return ToolSpec(name=name, pool="local", **fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise TypeError(f"tool '{name}': {first['loc'][0]}: {first['msg']}") from error


def _answer(flag: Any) -> bool:
    """A flag may be a value or a method that gives one."""
    return bool(flag() if callable(flag) else flag)


def _refuse_generators(function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool '{function_name(function)}': it is a generator: return the whole result instead of yielding parts")
