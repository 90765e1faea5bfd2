"""Text for the model: the system prompt, the descriptions of tools, and how to call them."""

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from toolcrew.contract.calls import COMMAND_FAILED, DEFAULT_TIMEOUT_S
from toolcrew.contract.functions.json_schemas import plain_schema, show_schema
from toolcrew.contract.registry import Tool
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dialects.profiles import SHELL_TOOL
from toolcrew.orchestrator.dialects.tag_gbnf import is_spellable
from toolcrew.orchestrator.dialects.tag_values import build_plain_tag_call, build_tag_call
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool

AnyTool = ToolSpec | Tool[Any] | Mapping[str, Any]
"""A ToolSpec, a tool with a spec, or a mapping with name, description and parameters."""

DEFAULT_INSTRUCTION = "You are a helpful assistant. Use the tools to answer."
NO_TOOLS = "No tools are currently available. Answer without calling a tool."
EXAMPLES_STOP = "\nUser:"
"""Stop sequence for a model that continues its reply in the style of the examples, with an invented result."""
_EXAMPLES = (
    # Otherwise a small model calls a program that a request names as if it were a tool.
    ("Use uname to print the kernel's name.", (("uname -s", "Linux"),), "The kernel is Linux."),
    # Otherwise a small model gives up after a failure, describes a change instead of making it, or repeats a wrong sed.
    (
        "`python3 check.py` fails. Fix add.py.\n\nFiles in the working directory:\nadd.py: 2 lines\n  def add(a, b):\n"
        "      return a - b",
        (
            (
                "cat > add.py <<'END'\ndef add(a, b):\n    return b - a\nEND\npython3 check.py",
                f"AssertionError\n{COMMAND_FAILED}",
            ),
            ("cat > add.py <<'END'\ndef add(a, b):\n    return a + b\nEND\npython3 check.py", "passed"),
        ),
        "I fixed add.py, and the check passes.",
    ),
)
"""Worked examples: for each one the request, the commands with their outputs, and the answer."""

_HOW_TO_CALL = """\
To use a tool, write its call as a tag, with one child tag for each parameter, and nothing after it:
{example}
Inside a value write " as &quot;.{json}{paired}
The result comes in the next message. When you have it, answer in plain words, without a tag."""
_HOW_TO_CALL_BRIEFLY = """\
When the user asks for something, first call the tool. Write exactly one call and nothing else:
{example}
When you have the result, answer in one plain sentence that repeats it, without a call."""
_JSON_VALUES = " A list or an object is written as JSON."
_PAIRED = " Text of several lines goes between the child's tags instead, as it is:\n"

_TEXTS = ("content", "text", "body", "code", "patch", "script")
"""Names of parameters whose values usually have several lines."""
_MAX_DEPTH = 4
_NO_CHARACTER = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


@dataclass(frozen=True)
class _ToolDescription:
    """The parts of a tool that its prompt contains. `limits` is empty when unknown."""

    name: str
    description: str
    properties: dict[str, Mapping[str, Any]]
    required: frozenset[str]
    limits: str = ""

    def example_keys(self) -> list[str]:
        """Return the parameters of an example call: the required ones, or else the first. Names that a tag cannot
        contain are left out.
        """
        spellable = [key for key in self.properties if is_spellable(key)]
        return [key for key in spellable if key in self.required] or spellable[:1]


def build_system_prompt(instruction: str = "", tool_prompt: str = "", example: str = "") -> str:
    """Return the system prompt: `instruction` (empty: a default), then the tool prompt and the example, if any."""
    parts = [instruction.strip() or DEFAULT_INSTRUCTION, tool_prompt.strip(), example.strip()]
    return "\n\n".join(part for part in parts if part)


def generate_tool_prompt(
    tools: Sequence[AnyTool], *, default_timeout_s: float = DEFAULT_TIMEOUT_S, is_brief: bool = False
) -> str:
    """Return the tool prompt for models that call by tags: each tool's name, description, parameters and limits, and
    the syntax of a call.

    Without tools, it only says that there are none. Each text from a tool is put on one line and cannot contain a tag.
    `default_timeout_s` is the limit of tools that define no limit. `is_brief`: omit the limits and the syntax of long
    values.
    """
    if not tools:
        return NO_TOOLS
    descriptions = [_describe(tool, default_timeout_s) for tool in tools]
    if is_brief:
        descriptions = [replace(tool, limits="") for tool in descriptions]
        instructions = _HOW_TO_CALL_BRIEFLY.format(example=_build_example(descriptions, build_plain_tag_call))
        return f"{_format_tools(descriptions)}\n\n{instructions}"
    is_json = any(_is_json(schema) for tool in descriptions for schema in tool.properties.values())
    paired = _build_paired_example(descriptions)
    instructions = _HOW_TO_CALL.format(
        example=_build_example(descriptions),
        json=_JSON_VALUES if is_json else "",
        paired=_PAIRED + paired if paired else "",
    )
    return f"{_format_tools(descriptions)}\n\n{instructions}"


def describe_tools(tools: Sequence[AnyTool], *, default_timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """Return names, descriptions, parameters and limits, for every dialect that lists tools in the system prompt."""
    return _format_tools([_describe(tool, default_timeout_s) for tool in tools])


def build_examples(specs: Sequence[ToolSpec], *, in_json: bool = False) -> str:
    """Return worked examples in the text of the system prompt, or "" without bash_tool.

    Small models need them; otherwise they call programs as if they were tools, or answer without a call.
    """
    if not any(spec.name == SHELL_TOOL for spec in specs):
        return ""
    blocks = []
    for number, (request, steps, answer) in enumerate(_EXAMPLES, 1):
        lines = [f"Example {number}:", f"User: {request}"]
        for command, output in steps:
            if in_json:
                call = json.dumps({"tool": SHELL_TOOL, "arguments": {"command": command}})
                heading = f"[Tool result for {SHELL_TOOL}]"
            else:
                call = build_plain_tag_call(SHELL_TOOL, {"command": command})
                heading = f"Tool result for {SHELL_TOOL}:"
            lines += [f"Assistant: {call}", f"User: {heading}", output]
        lines.append(f"Assistant: {json.dumps({'tool': None, 'reply': answer}) if in_json else answer}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def build_example_messages(specs: Sequence[ToolSpec]) -> list[Message]:
    """Return the worked examples as messages with native calls, or none without bash_tool."""
    if not any(spec.name == SHELL_TOOL for spec in specs):
        return []
    messages: list[Message] = []
    call_ids = (f"example{number:02d}" for number in count(1))
    for request, steps, answer in _EXAMPLES:
        messages.append({"role": "user", "content": request})
        for (command, output), call_id in zip(steps, call_ids, strict=False):
            function = {"name": SHELL_TOOL, "arguments": json.dumps({"command": command})}
            calls = [{"id": call_id, "type": "function", "function": function}]
            messages += [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": call_id, "content": output},
            ]
        messages.append({"role": "assistant", "content": answer})
    return messages


def _describe(tool: AnyTool, default_timeout_s: float) -> _ToolDescription:
    if isinstance(tool, Tool):
        tool = tool.spec
    if isinstance(tool, ToolSpec):
        limits = _format_limits(tool, default_timeout_s)
        return _build_description(tool.name, tool.description, show_schema(tool.parameters), limits)
    function = convert_to_openai_tool(tool)["function"]
    return _build_description(function["name"], function.get("description") or "", function.get("parameters") or {}, "")


def _build_description(name: str, description: str, parameters: Mapping[str, Any], limits: str) -> _ToolDescription:
    schema = plain_schema(parameters, null_as_type=True)
    properties = {key: sub if isinstance(sub, Mapping) else {} for key, sub in (schema.get("properties") or {}).items()}
    return _ToolDescription(name, description, properties, frozenset(schema.get("required") or ()), limits)


def _format_limits(spec: ToolSpec, default_timeout_s: float) -> str:
    location = f"sandbox {spec.network}" if spec.pool == "sandbox" else "no sandbox"
    usual_s = min(spec.timeout_s if spec.timeout_s is not None else default_timeout_s, spec.max_timeout_s)
    upper_limit = f", at most {spec.max_timeout_s:g} s" if usual_s < spec.max_timeout_s else ""
    return f"{location}; time limit {usual_s:g} s{upper_limit}"


# --- description of one tool -----------------------------------------------------------------------------------------


def _format_tools(descriptions: Sequence[_ToolDescription]) -> str:
    return "You have these tools:\n\n" + "\n\n".join(_format_tool(tool) for tool in descriptions)


def _format_tool(tool: _ToolDescription) -> str:
    parameters = [_format_parameter(key, sub, key in tool.required) for key, sub in tool.properties.items()]
    limits = [f"  ({tool.limits})"] if tool.limits else []
    return "\n".join(
        [
            f"{_format_line(tool.name)}: {_format_line(tool.description)}",
            *(parameters or ["  (no parameters)"]),
            *limits,
        ]
    )


def _format_parameter(name: str, schema: Mapping[str, Any], required: bool) -> str:
    facts = [_format_type(schema), *_format_range(schema), "required" if required else "optional"]
    if "default" in schema:
        facts.append(f"default {_format_json(schema['default'])}")
    line = f"  {_format_line(name)} ({', '.join(facts)})"
    description = _format_line(str(schema.get("description") or ""))
    return f"{line}: {description}" if description else line


def _format_type(schema: Any, depth: int = 0) -> str:
    """Return the type in short form: `integer`, `"a" | "b"`, `list of {old: string, all?: boolean}`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    if "const" in schema:
        return _format_json(schema["const"])
    if "enum" in schema:
        return " | ".join(_format_json(value) for value in schema["enum"])
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return " | ".join(dict.fromkeys(_format_type(branch, depth + 1) for branch in branches))
    kinds = schema.get("type", "object" if "properties" in schema else "any")
    return " | ".join(
        _format_plain_type(str(kind), schema, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    )


def _format_plain_type(type_name: str, schema: Mapping[str, Any], depth: int) -> str:
    if type_name == "array" and schema.get("items"):
        items = _format_type(schema["items"], depth + 1)
        return f"list of ({items})" if " | " in items else f"list of {items}"
    if type_name == "object" and schema.get("properties"):
        required = schema.get("required") or ()
        fields = (
            f"{_format_line(key)}{'' if key in required else '?'}: {_format_type(sub, depth + 1)}"
            for key, sub in schema["properties"].items()
        )
        return "{" + ", ".join(fields) + "}"
    return {"array": "list"}.get(type_name, _format_line(type_name))


def _format_range(schema: Mapping[str, Any]) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"{low} to {high}"
    elif low is not None or high is not None:
        yield f"from {low}" if low is not None else f"up to {high}"


def _format_json(value: Any) -> str:
    return _format_line(json.dumps(value, ensure_ascii=False))


def _format_line(text: str) -> str:
    """Return `text` on one line, without anything that could begin a tag: a tool's texts may be untrusted."""
    return clean_line(text).replace("<", "&lt;")


def clean_line(text: str) -> str:
    """Return `text` on one line, without control characters and other invisible characters."""
    return "".join(
        character for character in " ".join(text.split()) if unicodedata.category(character) not in _NO_CHARACTER
    )


# --- examples of calls -----------------------------------------------------------------------------------------------


def _build_example(
    descriptions: Sequence[_ToolDescription], build: Callable[[str, Mapping[str, str]], str] = build_tag_call
) -> str:
    """Return a call of the first tool that can be called by tags."""
    tool = next((tool for tool in descriptions if all(map(is_spellable, tool.required))), descriptions[0])
    return build(clean_line(tool.name), {key: _build_sample(key, tool.properties[key]) for key in tool.example_keys()})


def _build_paired_example(descriptions: Sequence[_ToolDescription]) -> str:
    """Return a call whose last parameter is text of two lines; "" when no tool takes text."""
    texts = [(tool, key) for tool in descriptions for key in tool.example_keys() if _is_text(tool.properties[key])]
    if not texts:
        return ""
    tool, text = next(((tool, key) for tool, key in texts if key in _TEXTS), texts[0])
    before = {key: _build_sample(key, tool.properties[key]) for key in tool.example_keys() if key != text}
    opening = build_tag_call(clean_line(tool.name), before).removesuffix("</tool_action>")
    return f"{opening}<{text}>\nfirst line\nsecond line\n</{text}></tool_action>"


def _build_sample(name: str, schema: Mapping[str, Any]) -> str:
    """Return a value that fits the schema's type."""
    if schema.get("enum"):
        return _format_text(schema["enum"][0])
    if "const" in schema:
        return _format_text(schema["const"])
    kind = schema.get("type")
    kind = kind if isinstance(kind, str) or not kind else kind[0]
    samples = {
        "integer": schema.get("minimum", 1),
        "number": schema.get("minimum", 1),
        "boolean": True,
        "array": [],
        "object": {},
    }
    return _format_text(samples[kind]) if kind in samples else clean_line(name).upper()


def _format_text(value: Any) -> str:
    return clean_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and not {"enum", "const"} & schema.keys()


def _is_json(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return bool({"array", "object"} & set([kinds] if isinstance(kinds, str) else kinds or ()))
