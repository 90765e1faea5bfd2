"""The grammar of replies with calls by tag, as GBNF.

llama.cpp's server constrains a reply to it, so a model can neither invent a tool nor misspell a tag.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.tag_grammar import DELIMITERS, TAG
from toolcrew.orchestrator.dialects.tag_values import escape_value

_RULES = {
    "reply": r"[^<\n] [^<]*",
    "line": r'([^"<\n] | "<" [^"/\n])*',
    "some": r'[^"<\n ] line',
    "body": r'([^<] | "<" [^/!<] | "<!" [^\[<])*',
    "positive": "[1-9] [0-9]{0,14}",
    "natural": '"0" | positive',
    "integer": '"-"? natural',
    "number": 'integer ("." [0-9]{1,9})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    # Inside an attribute: JSON's own quotes are written as entities, too.
    "array": '"[" (json (", " json)*)? "]"',
    "object": '"{" (member (", " member)*)? "}"',
    "member": 'quoted ": " json',
    "json": "object | array | quoted | number | boolean | null",
    "quoted": r'"&quot;" ([^"&\\\x00-\x1f] | "&amp;" | "\\&quot;" | "\\\\" | "\\n")* "&quot;"',
}
_USES = {
    "some": ("line",),
    "natural": ("positive",),
    "integer": ("natural",),
    "number": ("integer",),
    "array": ("json",),
    "object": ("member",),
    "member": ("quoted", "json"),
    "json": ("object", "array", "quoted", "number", "boolean", "null"),
}


def build_tag_grammar(specs: Sequence[ToolSpec]) -> str:
    """Return the GBNF of a reply: one canonical call of one of these tools, or text without a tag.

    A call has all required parameters and any optional ones, in the order of the schema. Enums, numbers, booleans,
    lists and objects must have valid values. A tool with a required parameter whose name cannot be written in a tag is
    left out.
    """
    callable_ = [spec for spec in specs if all(is_spellable(name) for name in _schema(spec).get("required") or ())]
    calls = {f"call-{index}": _build_call_rule(spec) for index, spec in enumerate(callable_)}
    rules = {"root": " | ".join([*calls, "reply"]), **{name: rule for name, (rule, _) in calls.items()}}
    _add_rules(rules, ["reply", *(used_rules for _, uses in calls.values() for used_rules in uses)])
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def is_spellable(name: str) -> bool:
    """Return whether a parameter name can be written in a tag."""
    return bool(name) and name != TAG and not DELIMITERS & set(name)


def _schema(spec: ToolSpec) -> dict[str, Any]:
    return dict(spec.parameters)


def _build_call_rule(spec: ToolSpec) -> tuple[str, list[str]]:
    """Return the rule for calls of a tool, and the rules that it uses."""
    required = _schema(spec).get("required") or ()
    # A schema may require a parameter that it does not describe.
    described = _schema(spec).get("properties") or {}
    properties = {**described, **{name: {} for name in required if name not in described}}
    parts, used_rules = [_literal(f'<{TAG} name="{_escape_name(spec.name)}">')], []
    for name, schema in properties.items():
        if is_spellable(name):
            child, uses = _build_child_rule(name, schema if isinstance(schema, Mapping) else {})
            parts.append(f"({child})" if name in required else f"({child})?")
            used_rules += uses
    return " ".join([*parts, _literal(f"</{TAG}>")]), used_rules


def _build_child_rule(name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the rule for a parameter's tag. Text of several lines may stand between an opening and a closing tag."""
    value, uses = _build_value_rule(schema)
    child = " ".join([_literal(f'<{name} value="'), value, _literal('" />')])
    if uses in (["line"], ["some"]):
        return f"{child} | {_literal(f'<{name}>')} body {_literal(f'</{name}>')}", [*uses, "body"]
    return child, uses


def _build_value_rule(schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the rule for the text between the quotes, and the rules that it uses."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return f"({' | '.join(_literal(escape_value(_text(value))) for value in values)})", []
    types = schema.get("type") or "string"
    types = [types] if isinstance(types, str) else list(types)
    if "string" in types:
        rules = ["some" if schema.get("minLength") else "line"]
    else:
        rules = [_select_integer_rule(schema) if type_name == "integer" else str(type_name) for type_name in types]
    return (rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"), rules


def _select_integer_rule(schema: Mapping[str, Any]) -> str:
    lowest = schema.get("minimum", -1)
    return "positive" if lowest >= 1 else "natural" if lowest >= 0 else "integer"


def _add_rules(rules: dict[str, str], names: Sequence[str]) -> None:
    for name in names:
        if name not in rules:
            rules[name] = _RULES[name]
            _add_rules(rules, _USES.get(name, ()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _escape_name(name: str) -> str:
    """Escape line breaks as well, because a header's value cannot contain them."""
    return escape_value(name).replace("\n", "&#10;").replace("\r", "&#13;")


def _literal(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r") + '"'
