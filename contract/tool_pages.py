"""Markdown description of a tool, made from its spec, for the documentation and for `toolcrew tools show`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import largest_limit

_POOLS = {
    "sandbox": "in the session's sandbox",
    "web": "in the pool with network, outside the sandbox",
    "tools": "in the pool of operators' tools, outside the sandbox",
    "local": "in the program that calls it",
}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches `{}`",
}


def render_tool(spec: ToolSpec) -> str:
    """Return description, parameters, limits, flags and aliases of a tool, under a second-level heading with its
    name.
    """
    parts = [f"## {spec.name}", spec.description, "\n".join(_parameter_rows(spec)), "\n".join(_facts(spec))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _parameter_rows(spec: ToolSpec) -> Iterator[str]:
    properties: Any = spec.parameters.get("properties", {})
    if not properties:
        yield "No parameters."
        return
    required: Any = spec.parameters.get("required", [])
    yield "| parameter | type | default | limits | |"
    yield "|---|---|---|---|---|"
    for name, value in properties.items():
        # JSON Schema allows `true` for a value of any type.
        schema: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        default = "required" if name in required else _code(schema["default"]) if "default" in schema else ""
        cells = (f"`{name}`", _type(schema), default, "; ".join(_limits(schema)), str(schema.get("description", "")))
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    items = schema.get("items")
    if kind == "array" and isinstance(items, Mapping):
        inner = items.get("properties")
        return f"array of {{{', '.join(inner)}}}" if inner else f"array of {_type(items)}"
    return str(kind)


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    if "enum" in schema:
        yield "one of " + ", ".join(_code(value) for value in schema["enum"])
    for keyword, text in _LIMITS.items():
        if keyword in ("minLength", "minItems") and schema.get(keyword) == 1:
            yield "not empty"
        elif keyword in schema:
            yield text.format(f"{schema[keyword]:,}" if isinstance(schema[keyword], int) else schema[keyword])


def _facts(spec: ToolSpec) -> Iterator[str]:
    limit_s = spec.timeout_s if spec.timeout_s is not None else DEFAULT_TIMEOUT_S
    is_long = largest_limit(spec, LONGEST_TIMEOUT_S) > spec.max_timeout_s
    more = ", or more where the tenant class allows it" if is_long else ""
    yield f"- Runs {_POOLS[spec.pool]}. Timeout: {limit_s:g} s by default, {spec.max_timeout_s:g} s at most{more}."
    flags = ("requires_permission", "dangerous", "read_only", "idempotent")
    yield "- Flags: " + (", ".join(flag for flag in flags if getattr(spec, flag)) or "none") + "."
    if spec.command_parameter is not None:
        yield (
            f"- The command in `{spec.command_parameter}` is checked: catastrophic commands are refused, dangerous "
            "commands need approval."
        )
    if spec.aliases:
        yield (
            "- Accepted aliases: " + ", ".join(f"`{alias}` for `{name}`" for alias, name in spec.aliases.items()) + "."
        )


def _code(value: object) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"
