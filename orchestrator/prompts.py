"""Text that tells a model of its tools: the system prompt, tool descriptions for text dialects, tool schemas for native ones."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from contract.registry import Tool
from contract.specs import ToolSpec

AnyTool = ToolSpec | Tool[Any] | Mapping[str, Any]
"""A spec, a tool with one, or a mapping with name, description and parameters."""

DEFAULT_INSTRUCTION = "You are a helpful assistant. Use the tools to answer. After the tool result, answer in one short sentence."
NO_TOOLS = "No tools are currently available. Answer without calling a tool."
SMALL_MODEL_HINT = "Now answer the user in one plain sentence."
"""Ends the results' message for models that would otherwise call the same tool again."""

_HOW_TO_CALL = """\
To use a tool, write its call as a tag, with one child tag for each parameter, and nothing after it:
{example}
Inside a value write " as &quot;. Text of several lines goes between the child's tags instead: <{name}>text</{name}>.
The result comes in the next message. When you have it, answer in plain words, without a tag."""


def build_system_prompt(instruction: str = "", tool_prompt: str = "") -> str:
    """The system prompt: `instruction` (empty: a default one), then what is to be said of the tools, if anything."""
    parts = [instruction.strip() or DEFAULT_INSTRUCTION, tool_prompt.strip()]
    return "\n\n".join(part for part in parts if part)


def generate_tool_prompt(tools: Sequence[AnyTool]) -> str:
    """What a model that calls by tags reads: every tool's name, description and parameters, and an example. Without tools, that there are none."""
    specs = [_described(tool) for tool in tools]
    if not specs:
        return NO_TOOLS
    listing = "\n\n".join(_describe(spec) for spec in specs)
    example, name = _example(specs[0])
    return f"You have these tools:\n\n{listing}\n\n{_HOW_TO_CALL.format(example=example, name=name)}"


def convert_to_openai_tool(tool: AnyTool) -> dict[str, Any]:
    """The tool as an entry of a chat request's `tools`."""
    name, description, parameters = _described(tool)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _described(tool: AnyTool) -> tuple[str, str, dict[str, Any]]:
    if isinstance(tool, Tool):
        tool = tool.spec
    if isinstance(tool, ToolSpec):
        return tool.name, tool.description, dict(tool.parameters)
    return tool["name"], tool.get("description", ""), dict(tool.get("parameters") or {"type": "object", "properties": {}})


def _describe(spec: tuple[str, str, dict[str, Any]]) -> str:
    name, description, schema = spec
    required = schema.get("required", [])
    lines = [_parameter(key, sub, key in required) for key, sub in _properties(schema).items()]
    return "\n".join([f"{name}: {description}", *(lines or ["  (no parameters)"])])


def _parameter(name: str, schema: Mapping[str, Any], required: bool) -> str:
    facts = [_kind(schema), "required" if required else "optional"]
    if "default" in schema:
        facts.append(f"default {json.dumps(schema['default'], ensure_ascii=False)}")
    if "enum" in schema:
        facts.append(f"one of {json.dumps(schema['enum'], ensure_ascii=False)}")
    line = f"  {name} ({', '.join(facts)})"
    return f"{line}: {schema['description']}" if schema.get("description") else line


def _kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(str(part) for part in kind)


def _example(spec: tuple[str, str, dict[str, Any]]) -> tuple[str, str]:
    """A call of the tool with its required parameters, and the name of one parameter."""
    name, _, schema = spec
    properties = list(_properties(schema))
    keys = [key for key in properties if key in schema.get("required", [])] or properties[:1]
    children = "".join(f'<{key} value="{key.upper()}" />' for key in keys)
    return f'<tool_action name="{name}">{children}</tool_action>', keys[0] if keys else "parameter"


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    properties = schema.get("properties") or {}
    return {name: sub for name, sub in properties.items() if isinstance(sub, Mapping)}
