"""Schemas of others, of MCP servers and of tenants, as far as models may be told of them and arguments be checked by them: bounded in every way that costs something."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from jsonschema.exceptions import SchemaError

from contract.schema import check_schema
from workers.web.fences import printable

MAX_SCHEMA_BYTES = 16 * 1024
MAX_SCHEMA_DEPTH = 24
MAX_EXPANDED = 2000
"""Schemas that a check of arguments may have to look at, references followed."""
HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Letters that a person does not see and a model reads, and what shows text in another order than it has."""
_PARTS = ("properties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("items", "contains", "unevaluatedItems", "additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("not", "if", "then", "else"),
)
_DROPPED = ("$schema", "$id", "pattern", "patternProperties")
"""The first two turn references elsewhere; a pattern by somebody else may take for ever, and whoever runs the tool checks it."""


class SchemaRefused(Exception):
    """In words for the operator."""


def bound_schema(given: Any) -> dict[str, Any]:
    """The schema without what is not checked here. Raises SchemaRefused."""
    if not isinstance(given, dict) or given.get("type") != "object":
        raise SchemaRefused("its parameters are no object")
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise SchemaRefused("its schema is no plain JSON") from None
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise SchemaRefused(f"its schema is larger than {MAX_SCHEMA_BYTES} bytes")
    _check_texts(given)
    schema: dict[str, Any] = _without(given)
    try:
        check_schema(schema)
    except SchemaError as error:
        raise SchemaRefused(f"its schema is none: {printable(error.message)[:200]}") from None
    _check_expansion(schema)
    return schema


def _check_texts(schema: Any) -> None:
    """Before anything is walked: how deep it is, and that all of it can be shown. Raises SchemaRefused."""
    left = [(schema, 0)]
    while left:
        value, depth = left.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefused(f"its schema is nested more than {MAX_SCHEMA_DEPTH} deep")
        if isinstance(value, str) and (printable(value) != value or HIDDEN.search(value)):
            raise SchemaRefused("its schema has characters that cannot be seen")
        if isinstance(value, dict):
            if "x-mcp-header" in value:
                raise SchemaRefused("it wants parameters in headers, which are not sent")
            left += [(part, depth + 1) for part in (*value.keys(), *value.values())]
        elif isinstance(value, list):
            left += [(part, depth + 1) for part in value]


def _without(schema: Any) -> Any:
    """A copy without _DROPPED, wherever a schema stands; parameters may well be called so."""
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DROPPED:
            continue
        if key in _PARTS and isinstance(value, dict):
            copy[key] = {name: _without(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            copy[key] = [_without(part) for part in value]
        else:
            copy[key] = _without(value) if key in _SINGLE else value
    return copy


def _check_expansion(schema: Mapping[str, Any]) -> None:
    """Few references can stand for very many schemas, or for endlessly many. Raises SchemaRefused."""
    seen, left = 0, [(schema, frozenset[str]())]
    while left:
        part, above = left.pop()
        seen += 1
        if seen > MAX_EXPANDED:
            raise SchemaRefused(f"its schema stands for more than {MAX_EXPANDED} others")
        if any(key in part for key in _DROPPED):
            # A reference may lead to where nothing was dropped, as into a default.
            raise SchemaRefused("its schema refers to what is no place of a schema")
        for key in ("$ref", "$dynamicRef"):
            if isinstance(reference := part.get(key), str):
                if reference in above:
                    raise SchemaRefused("its schema refers to itself")
                left.append((_find(schema, reference), above | {reference}))
        left += [(one, above) for one in _applied(part)]


def _applied(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Those that arguments are checked by because of this one."""
    for key, value in part.items():
        if key in ("properties", "dependentSchemas") and isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, dict))
        elif key in _LISTS and isinstance(value, list):
            yield from (one for one in value if isinstance(one, dict))
        elif key in _SINGLE and isinstance(value, dict):
            yield value


def _find(schema: Mapping[str, Any], reference: str) -> Mapping[str, Any]:
    """What check_schema has found to be within the schema; of the two that need no look, nothing."""
    part: Any = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}
