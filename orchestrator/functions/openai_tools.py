"""Conversion of tools in any form to an entry of a chat request's `tools`."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from toolcrew.contract.functions.docstrings import parse_docstring
from toolcrew.contract.functions.function_schemas import read_function
from toolcrew.contract.functions.json_schemas import close_schema, plain_schema, show_schema
from toolcrew.contract.registry import Tool
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.functions.langchain_shape import (
    base_tool_schema,
    is_base_tool,
    is_langchain_shaped,
    langchain_schema,
    schema_of,
)

EMPTY_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

HOSTED_TOOLS = frozenset(
    {
        "code_interpreter",
        "computer_use_preview",
        "custom",
        "file_search",
        "function",
        "image_generation",
        "local_shell",
        "mcp",
        "tool_search",
        "web_search",
    }
)
"""Types of `tools` entries that OpenAI's servers accept, in addition to `web_search_preview` and its dated variants."""


def convert_to_openai_tool(tool: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """Return `{"type": "function", "function": {name, description, parameters[, strict]}}` for a tool.

    `tool` is a spec, a Tool, an object in LangChain's shape, a pydantic or TypedDict class, a function, or a dict. A
    dict has the form of OpenAI, of Anthropic (`input_schema`), of Bedrock (`toolSpec`), or is a JSON Schema with a
    title. An entry of OpenAI's `tools` is returned unchanged. `strict`: True closes every object and requires all of
    its properties.

    Raises ValueError when `tool` contradicts `strict` or is not a tool. Raises TypeError for a function with a
    signature that a model could not fill in.
    """
    if isinstance(tool, Mapping) and _is_entry(tool):
        if strict is None or not isinstance(tool.get("function"), Mapping):
            return dict(tool)
        return {**tool, "function": _with_strict(dict(tool["function"]), strict)}
    return {"type": "function", "function": _with_strict(_describe(tool), strict)}


def _is_entry(tool: Mapping[str, Any]) -> bool:
    entry_type = tool.get("type")
    return isinstance(entry_type, str) and (entry_type in HOSTED_TOOLS or entry_type.startswith("web_search_preview"))


def _with_strict(function: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    if strict is None:
        return function
    declared = function.get("strict")
    if declared is not None and declared != strict:
        raise ValueError(
            f"tool '{function.get('name')}' declares strict={declared}, but strict={strict} was requested: use the "
            "same value"
        )
    if strict:
        function["parameters"] = close_schema(function.get("parameters") or EMPTY_PARAMETERS)
    return {**function, "strict": strict}


def _describe(tool: Any) -> dict[str, Any]:
    if isinstance(tool, Tool):
        tool = tool.spec
    if isinstance(tool, ToolSpec):
        return _function(tool.name, tool.description, show_schema(tool.parameters))
    if isinstance(tool, Mapping):
        return _from_mapping(tool)
    if isinstance(tool, type):
        return _from_class(tool)
    if callable(getattr(tool, "execute", None)) and isinstance(getattr(tool, "name", None), str):
        return _function(
            tool.name, getattr(tool, "description", ""), schema_of(getattr(tool, "parameters", None) or {})
        )
    if is_langchain_shaped(tool):
        return _function(tool.name, tool.description, langchain_schema(tool))
    if is_base_tool(tool):
        return _function(tool.name, tool.description, base_tool_schema(tool))
    if callable(tool):
        return _from_function(tool)
    raise ValueError(
        f"{type(tool).__name__} is not a tool: pass a dict, a pydantic class, a function or an object with name and "
        "description"
    )


def _from_mapping(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "name" in tool and "input_schema" in tool:
        return _function(tool["name"], tool.get("description"), tool["input_schema"])
    if "toolSpec" in tool:
        inner = tool["toolSpec"]
        try:
            return _function(inner["name"], inner.get("description"), inner["inputSchema"]["json"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                "a tool with `toolSpec` is incomplete: write "
                "{'toolSpec': {'name': ..., 'inputSchema': {'json': {...}}}}"
            ) from error
    if "name" in tool:
        function = _function(tool["name"], tool.get("description"), tool.get("parameters"))
        return {**function, "strict": tool["strict"]} if "strict" in tool else function
    if "title" in tool:
        schema = {key: value for key, value in tool.items() if key not in ("title", "description")}
        return _function(tool["title"], tool.get("description"), schema if "properties" in schema else None)
    raise ValueError(
        "the dict does not describe a tool: give it a name (OpenAI, Anthropic), a toolSpec (Bedrock) or a title "
        "(JSON Schema)"
    )


def _from_class(cls: type[Any]) -> dict[str, Any]:
    if issubclass(cls, dict) and hasattr(cls, "__required_keys__"):
        schema = plain_schema(TypeAdapter(cls).json_schema())
        docstring = parse_docstring(cls.__doc__)
        return _function(
            cls.__name__, docstring.description, {key: value for key, value in schema.items() if key != "description"}
        )
    if issubclass(cls, BaseModel):
        raw = cls.model_json_schema()
    elif callable(getattr(cls, "schema", None)):
        raw = cls.schema()
    else:
        raise ValueError(
            f"the class {cls.__name__} is not a pydantic model: pass an instance, a pydantic class or a function"
        )
    parameters = plain_schema(raw)
    description = parameters.pop("description", "")
    return _function(raw.get("title") or cls.__name__, description, parameters)


def _from_function(function: Callable[..., Any]) -> dict[str, Any]:
    shape = read_function(function)
    return _function(shape.name, shape.docstring.description, shape.schema)


def _function(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "description": description or "", "parameters": {**EMPTY_PARAMETERS, **(parameters or {})}}
