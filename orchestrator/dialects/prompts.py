"""Text that tells a model of its tools: the system prompt, and what a text dialect says of every tool and of how to
call it.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.calls import DEFAULT_TIMEOUT_S
from contract.functions.json_schemas import plain_schema
from contract.registry import Tool
from contract.specs import ToolSpec
from orchestrator.dialects.tag_gbnf import is_spellable
from orchestrator.dialects.tag_values import build_tag_call
from orchestrator.functions.openai_tools import convert_to_openai_tool

AnyTool = ToolSpec | Tool[Any] | Mapping[str, Any]
"""A spec, a tool with one, or a mapping with name, description and parameters."""

DEFAULT_INSTRUCTION = (
    "You are a helpful assistant. Use the tools to answer. After the tool result, answer in one short sentence."
)
NO_TOOLS = "No tools are currently available. Answer without calling a tool."
SMALL_MODEL_HINT = "Now answer the user in one plain sentence."
"""Ends the results' message for models that would otherwise call the same tool again."""

SMALL_MODEL_JSON_HINT = 'Now reply to the user in one plain sentence, with "tool": null.'
"""The same for decisions in JSON: the other hint makes a small model write its call again."""

_WORKED_EXAMPLE = """\
Example:
User: Use uname to print the kernel's name.
Assistant: {call}
User: {heading}
Linux
Assistant: {answer}"""
_WORKED_IN_TAGS = _WORKED_EXAMPLE.format(
    call=build_tag_call("bash_tool", {"command": "uname -s"}),
    heading="Tool result for bash_tool:",
    answer="The kernel is Linux.",
)
_WORKED_IN_JSON = _WORKED_EXAMPLE.format(
    call='{"tool": "bash_tool", "arguments": {"command": "uname -s"}}',
    heading="[Tool result for bash_tool]",
    answer='{"tool": null, "reply": "The kernel is Linux."}',
)
WORKED_EXAMPLE_STOP = "\nUser:"
"""Ends a reply in which the model goes on as the example does, with a result that it made up."""

_HOW_TO_CALL = """\
To use a tool, write its call as a tag, with one child tag for each parameter, and nothing after it:
{example}
Inside a value write " as &quot;.{json}{paired}
The result comes in the next message. When you have it, answer in plain words, without a tag."""
_JSON_VALUES = " A list or an object is written as JSON."
_PAIRED = " Text of several lines goes between the child's tags instead, as it is:\n"

_TEXTS = ("content", "text", "body", "code", "patch", "script")
"""Parameters that mostly hold several lines."""
_MAX_DEPTH = 4
_NO_CHARACTER = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


@dataclass(frozen=True)
class _Described:
    """A tool as its prompt tells it. `limits` is empty where they are not known."""

    name: str
    description: str
    properties: dict[str, Mapping[str, Any]]
    required: frozenset[str]
    limits: str = ""

    def example_keys(self) -> list[str]:
        """Parameters of an example call: the required ones, or else the first; only those whose names can be written in
        a tag.
        """
        spellable = [key for key in self.properties if is_spellable(key)]
        return [key for key in spellable if key in self.required] or spellable[:1]


def build_system_prompt(instruction: str = "", tool_prompt: str = "", example: str = "") -> str:
    """The system prompt: `instruction` (empty: a default one), then what is to be said of the tools, if anything."""
    parts = [instruction.strip() or DEFAULT_INSTRUCTION, tool_prompt.strip(), example.strip()]
    return "\n\n".join(part for part in parts if part)


def generate_tool_prompt(tools: Sequence[AnyTool], *, default_timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """What a model that calls by tags reads: every tool's name, description, parameters and limits, and how a call is
    written.

    Without tools, only that there are none. What the tools say of themselves is brought into one line each and can hold
    no tag. `default_timeout_s`: the limit of tools that name none.
    """
    if not tools:
        return NO_TOOLS
    told = [_described(tool, default_timeout_s) for tool in tools]
    is_json = any(_is_json(schema) for tool in told for schema in tool.properties.values())
    paired = _paired_example(told)
    how = _HOW_TO_CALL.format(
        example=_example(told), json=_JSON_VALUES if is_json else "", paired=_PAIRED + paired if paired else ""
    )
    return f"{_list(told)}\n\n{how}"


def describe_tools(tools: Sequence[AnyTool], *, default_timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """Names, descriptions, parameters and limits, for every dialect that tells of tools in the system prompt."""
    return _list([_described(tool, default_timeout_s) for tool in tools])


def build_worked_example(specs: Sequence[ToolSpec], *, in_json: bool = False) -> str:
    """A whole exchange, which models of half a billion parameters need lest they call programs as tools. Empty without
    bash_tool.
    """
    worked = _WORKED_IN_JSON if in_json else _WORKED_IN_TAGS
    return worked if any(spec.name == "bash_tool" for spec in specs) else ""


def _described(tool: AnyTool, default_timeout_s: float) -> _Described:
    if isinstance(tool, Tool):
        tool = tool.spec
    if isinstance(tool, ToolSpec):
        limits = _limits(tool, default_timeout_s)
        return _from_schema(tool.name, tool.description, tool.parameters, limits)
    function = convert_to_openai_tool(tool)["function"]
    return _from_schema(function["name"], function.get("description") or "", function.get("parameters") or {}, "")


def _from_schema(name: str, description: str, parameters: Mapping[str, Any], limits: str) -> _Described:
    schema = plain_schema(parameters, tell_null_as_type=True)
    properties = {key: sub if isinstance(sub, Mapping) else {} for key, sub in (schema.get("properties") or {}).items()}
    return _Described(name, description, properties, frozenset(schema.get("required") or ()), limits)


def _limits(spec: ToolSpec, default_timeout_s: float) -> str:
    where = f"sandbox {spec.network}" if spec.pool == "sandbox" else "no sandbox"
    usual_s = min(spec.timeout_s if spec.timeout_s is not None else default_timeout_s, spec.max_timeout_s)
    most = f", at most {spec.max_timeout_s:g} s" if usual_s < spec.max_timeout_s else ""
    return f"{where}; time limit {usual_s:g} s{most}"


# --- what is said of one tool -----------------------------------------------------------------------------------------


def _list(told: Sequence[_Described]) -> str:
    return "You have these tools:\n\n" + "\n\n".join(_describe(tool) for tool in told)


def _describe(tool: _Described) -> str:
    parameters = [_parameter(key, sub, key in tool.required) for key, sub in tool.properties.items()]
    limits = [f"  ({tool.limits})"] if tool.limits else []
    return "\n".join(
        [f"{_line(tool.name)}: {_line(tool.description)}", *(parameters or ["  (no parameters)"]), *limits]
    )


def _parameter(name: str, schema: Mapping[str, Any], required: bool) -> str:
    facts = [_kind(schema), *_range(schema), "required" if required else "optional"]
    if "default" in schema:
        facts.append(f"default {_json(schema['default'])}")
    line = f"  {_line(name)} ({', '.join(facts)})"
    description = _line(str(schema.get("description") or ""))
    return f"{line}: {description}" if description else line


def _kind(schema: Any, depth: int = 0) -> str:
    """The type in a few words: `integer`, `"a" | "b"`, `list of {old: string, all?: boolean}`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    if "const" in schema:
        return _json(schema["const"])
    if "enum" in schema:
        return " | ".join(_json(value) for value in schema["enum"])
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return " | ".join(dict.fromkeys(_kind(branch, depth + 1) for branch in branches))
    kinds = schema.get("type", "object" if "properties" in schema else "any")
    return " | ".join(_plain_kind(str(kind), schema, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _plain_kind(kind: str, schema: Mapping[str, Any], depth: int) -> str:
    if kind == "array" and "items" in schema:
        items = _kind(schema["items"], depth + 1)
        return f"list of ({items})" if " | " in items else f"list of {items}"
    if kind == "object" and schema.get("properties"):
        required = schema.get("required") or ()
        fields = (
            f"{_line(key)}{'' if key in required else '?'}: {_kind(sub, depth + 1)}"
            for key, sub in schema["properties"].items()
        )
        return "{" + ", ".join(fields) + "}"
    return {"array": "list"}.get(kind, _line(kind))


def _range(schema: Mapping[str, Any]) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"{low} to {high}"
    elif low is not None or high is not None:
        yield f"from {low}" if low is not None else f"up to {high}"


def _json(value: Any) -> str:
    return _line(json.dumps(value, ensure_ascii=False))


def _line(text: str) -> str:
    """`text` on one line and without anything that could begin a tag: a tool may come from a stranger."""
    return _clean(text).replace("<", "&lt;")


def _clean(text: str) -> str:
    """On one line, without control characters and others that are not seen."""
    return "".join(
        character for character in " ".join(text.split()) if unicodedata.category(character) not in _NO_CHARACTER
    )


# --- how it is called -------------------------------------------------------------------------------------------------


def _example(told: Sequence[_Described]) -> str:
    """A call of the first tool that can be called by tags."""
    tool = next((tool for tool in told if all(map(is_spellable, tool.required))), told[0])
    return build_tag_call(_clean(tool.name), {key: _sample(key, tool.properties[key]) for key in tool.example_keys()})


def _paired_example(told: Sequence[_Described]) -> str:
    """A call whose last parameter is text of two lines; empty when no tool takes text."""
    texts = [(tool, key) for tool in told for key in tool.example_keys() if _is_text(tool.properties[key])]
    if not texts:
        return ""
    tool, text = next(((tool, key) for tool, key in texts if key in _TEXTS), texts[0])
    before = {key: _sample(key, tool.properties[key]) for key in tool.example_keys() if key != text}
    opening = build_tag_call(_clean(tool.name), before).removesuffix("</tool_action>")
    return f"{opening}<{text}>\nfirst line\nsecond line\n</{text}></tool_action>"


def _sample(name: str, schema: Mapping[str, Any]) -> str:
    """A value that the schema allows, as far as its type tells."""
    if schema.get("enum"):
        return _text(schema["enum"][0])
    if "const" in schema:
        return _text(schema["const"])
    kind = schema.get("type")
    kind = kind if isinstance(kind, str) or not kind else kind[0]
    samples = {
        "integer": schema.get("minimum", 1),
        "number": schema.get("minimum", 1),
        "boolean": True,
        "array": [],
        "object": {},
    }
    return _text(samples[kind]) if kind in samples else _clean(name).upper()


def _text(value: Any) -> str:
    return _clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and not {"enum", "const"} & schema.keys()


def _is_json(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return bool({"array", "object"} & set([kinds] if isinstance(kinds, str) else kinds or ()))
