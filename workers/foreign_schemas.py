"""Schemas of others, of MCP servers and of tenants, as far as models may be told of them and arguments be checked by
them: bounded in every way that costs something.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jsonschema.exceptions import SchemaError

from contract.schema import applied_schemas, check_schema, count_parts
from workers.web.fences import printable

MAX_SCHEMA_BYTES = 16 * 1024
MAX_SCHEMA_DEPTH = 24
MAX_PARTS = 2000
"""Schemas that a check of arguments may have to look at, references followed, and the values in their lists."""
HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Letters that a person does not see and a model reads, and what shows text in another order than it has."""
_PARTS = ("properties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
_DROPPED = ("$schema", "$id", "pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")
"""The first two turn references elsewhere. A check of the others may take exponential time; the program that runs the
tool checks them.
"""


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
    parts = 0
    for part, is_repeated in applied_schemas(schema):
        if is_repeated:
            raise SchemaRefused("its schema refers to itself")
        if any(key in part for key in _DROPPED):
            # A reference may lead to where nothing was dropped, as into a default.
            raise SchemaRefused("its schema refers to what is no place of a schema")
        parts += count_parts(part)
        if parts > MAX_PARTS:
            raise SchemaRefused(f"its schema stands for more than {MAX_PARTS} others")
