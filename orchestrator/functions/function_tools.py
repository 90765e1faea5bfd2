"""Tools of a program: `as_tool` converts objects to tools. The contract defines the decorator `tool`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from toolcrew.contract.functions.call_context import CallHandler
from toolcrew.contract.functions.call_handlers import build_execute_handler
from toolcrew.contract.functions.function_tools import FunctionTool, checked_spec, tool
from toolcrew.contract.functions.json_schemas import plain_schema
from toolcrew.contract.registry import Tool
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.functions.langchain_shape import (
    base_tool_schema,
    build_base_tool_handler,
    build_langchain_handler,
    check_injected,
    is_base_tool,
    is_langchain_shaped,
    langchain_schema,
    schema_of,
)
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool

__all__ = ["FunctionTool", "LocalTool", "as_tool", "convert_to_openai_tool", "tool"]

LocalTool = Tool[CallHandler]

_FLAGS = ("requires_permission", "dangerous", "read_only", "idempotent")


def as_tool(value: Any) -> LocalTool:
    """Convert `value` to a tool. A Tool is returned unchanged.

    `value` can be a function, or an object or dict with name, description, parameters and execute(args[, context]).
    `value` can also be an object with `_run` or `run`, or an object in LangChain's shape.

    Raises TypeError that names the missing or invalid part.
    """
    if isinstance(value, Tool):
        return value
    try:
        return _build_tool(value)
    except TypeError:
        raise
    except Exception as error:  # the edge: a foreign object computes its attributes and schemas with its own code
        raise TypeError(
            f"cannot convert a {type(value).__name__} to a tool: {type(error).__name__}: {error}"
        ) from error


def _build_tool(value: Any) -> LocalTool:
    if isinstance(value, type):
        raise TypeError(f"{value.__name__} is a class: pass an instance of the class, or a function")
    if inspect.isroutine(value):
        return tool(value)
    if isinstance(value, Mapping):
        return _from_parts(value.get)
    if callable(getattr(value, "execute", None)):
        return _from_parts(lambda key: getattr(value, key, None))
    if is_langchain_shaped(value):
        check_injected(value)
        schema = langchain_schema(value)
        return Tool(_spec_of(value, schema), build_langchain_handler(value, schema))
    if is_base_tool(value):
        return Tool(_spec_of(value, base_tool_schema(value)), build_base_tool_handler(value))
    if callable(value):
        return tool(value)
    type_name = type(value).__name__
    raise TypeError(
        f"cannot convert a {type_name} to a tool: pass a function, or an object with name, description and one of "
        "execute, ainvoke, invoke, _run, run"
    )


def _from_parts(part: Callable[[str], Any]) -> LocalTool:
    """Build a tool from name, description, parameters and execute, which `part` returns by name."""
    name, execute = part("name"), part("execute")
    if not isinstance(name, str) or not name:
        raise TypeError("a tool needs a name: set 'name' to a string")
    if not callable(execute):
        raise TypeError(
            f"tool '{name}' has no function: set 'execute' to a function execute(args) or execute(args, context)"
        )
    return Tool(_build_spec(name, part, schema_of(part("parameters") or {})), build_execute_handler(execute))


def _spec_of(value: Any, schema: dict[str, Any]) -> ToolSpec:
    return _build_spec(value.name, lambda key: getattr(value, key, None), plain_schema(schema, null_as_type=True))


def _build_spec(name: str, part: Callable[[str], Any], schema: dict[str, Any]) -> ToolSpec:
    timeout_s = part("timeout_s")
    return checked_spec(
        name,
        description=part("description") or f"The tool {name}.",
        parameters=schema,
        timeout_s=timeout_s if isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool) else None,
        **{flag: _read_flag(part(flag)) for flag in _FLAGS},
    )


def _read_flag(flag: Any) -> bool:
    """Return the value of a flag, which is a value or a method that returns the value."""
    return bool(flag() if callable(flag) else flag)
