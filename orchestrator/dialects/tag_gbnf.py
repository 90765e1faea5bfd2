"""The grammar of replies with calls by tag, as GBNF: llama.cpp's servers hold a reply to it, so a model can neither
invent a tool nor misspell a tag.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from contract.specs import ToolSpec
from orchestrator.dialects.tag_grammar import DELIMITERS, TAG
from orchestrator.dialects.tag_values import escape_value

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
    """GBNF of what may be replied: one canonical call of one of these tools, or text without a tag.

    A call has all required parameters and any optional ones, in the order of the schema; enums, numbers, booleans,
    lists and objects can only be written as such. A tool that cannot be called by tags, for the name of a required
    parameter, is left out.
    """
    callable_ = [spec for spec in specs if all(is_spellable(name) for name in _schema(spec).get("required") or ())]
    calls = {f"call-{index}": _call(spec) for index, spec in enumerate(callable_)}
    rules = {"root": " | ".join([*calls, "reply"]), **{name: rule for name, (rule, _) in calls.items()}}
    _add(rules, ["reply", *(used for _, uses in calls.values() for used in uses)])
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def is_spellable(name: str) -> bool:
    """Whether a parameter of that name can be written in a tag."""
    return bool(name) and name != TAG and not DELIMITERS & set(name)


def _schema(spec: ToolSpec) -> dict[str, Any]:
    return dict(spec.parameters)


def _call(spec: ToolSpec) -> tuple[str, list[str]]:
    """The rule of a tool's calls, and the rules that it uses."""
    required = _schema(spec).get("required") or ()
    # What is required need not be described.
    described = _schema(spec).get("properties") or {}
    properties = {**described, **{name: {} for name in required if name not in described}}
    parts, used = [_literal(f'<{TAG} name="{_escape_name(spec.name)}">')], []
    for name, schema in properties.items():
        if is_spellable(name):
            child, uses = _child(name, schema if isinstance(schema, Mapping) else {})
            parts.append(f"({child})" if name in required else f"({child})?")
            used += uses
    return " ".join([*parts, _literal(f"</{TAG}>")]), used


def _child(name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A parameter's tag; text may also stand between an opening and a closing one, where it may have several lines."""
    value, uses = _value(schema)
    child = " ".join([_literal(f'<{name} value="'), value, _literal('" />')])
    if uses in (["line"], ["some"]):
        return f"{child} | {_literal(f'<{name}>')} body {_literal(f'</{name}>')}", [*uses, "body"]
    return child, uses


def _value(schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What may stand between the quotes, and the rules that it uses."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return f"({' | '.join(_literal(escape_value(_text(value))) for value in values)})", []
    kinds = schema.get("type") or "string"
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if "string" in kinds:
        rules = ["some" if schema.get("minLength") else "line"]
    else:
        rules = [_integer(schema) if kind == "integer" else str(kind) for kind in kinds]
    return (rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"), rules


def _integer(schema: Mapping[str, Any]) -> str:
    lowest = schema.get("minimum", -1)
    return "positive" if lowest >= 1 else "natural" if lowest >= 0 else "integer"


def _add(rules: dict[str, str], names: Sequence[str]) -> None:
    for name in names:
        if name not in rules:
            rules[name] = _RULES[name]
            _add(rules, _USES.get(name, ()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _escape_name(name: str) -> str:
    """A header's value may hold no line break."""
    return escape_value(name).replace("\n", "&#10;").replace("\r", "&#13;")


def _literal(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r") + '"'
