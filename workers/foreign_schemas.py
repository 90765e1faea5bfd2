"""Schemas from MCP servers and tenants.

This module limits and cleans such schemas before they are used in requests to models and in checks of arguments.

Invariant: a foreign schema has limited size, depth and checking time, and no characters that a person cannot see.
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
"""Limit of the work of one check of arguments: the number of visited subschemas, including those behind references,
plus the number of values in their lists.
"""
HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Characters that are invisible to a person but not to a model, and characters that change the order of text."""
_PARTS = ("properties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
_DROPPED = ("$schema", "$id", "pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")
"""Keywords that are removed. `$schema` and `$id` change where references lead. A check of the other keywords may take
exponential time.

The program that runs the tool checks the removed keywords.
"""


class SchemaRefused(Exception):
    """Error for a schema that is not accepted. The message is for the operator."""


def bound_schema(received: Any) -> dict[str, Any]:
    """Return the schema without the keywords in _DROPPED, after all checks. Raises SchemaRefused."""
    if not isinstance(received, dict) or received.get("type") != "object":
        raise SchemaRefused("its parameters are not an object")
    try:
        text = json.dumps(received, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise SchemaRefused("its schema is not valid JSON") from None
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise SchemaRefused(f"its schema is larger than {MAX_SCHEMA_BYTES} bytes")
    _check_texts(received)
    schema: dict[str, Any] = _without(received)
    try:
        check_schema(schema)
    except SchemaError as error:
        raise SchemaRefused(f"its schema is invalid: {printable(error.message)[:200]}") from None
    _check_expansion(schema)
    return schema


def _check_texts(schema: Any) -> None:
    """Check the depth of the schema and its characters, before any recursive code runs. Raises SchemaRefused."""
    # An explicit stack: recursion over a deep schema would exceed the interpreter's limit.
    pending = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefused(f"its schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(value, str) and (printable(value) != value or HIDDEN.search(value)):
            raise SchemaRefused("its schema has invisible characters")
        if isinstance(value, dict):
            if "x-mcp-header" in value:
                raise SchemaRefused("it needs parameters in headers, which are not sent")
            pending += [(part, depth + 1) for part in (*value.keys(), *value.values())]
        elif isinstance(value, list):
            pending += [(part, depth + 1) for part in value]


def _without(schema: Any) -> Any:
    """Return a copy without the keywords in _DROPPED. A parameter whose name equals such a keyword is kept."""
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
    """Raise SchemaRefused when the schema, with its references expanded, is too large or endless."""
    parts = 0
    for part, is_repeated in applied_schemas(schema):
        if is_repeated:
            raise SchemaRefused("its schema refers to itself")
        if any(key in part for key in _DROPPED):
            # A reference may lead to a value that is no schema, such as a default. The keywords in _DROPPED were not
            # removed there.
            raise SchemaRefused("its schema has an invalid reference")
        parts += count_parts(part)
        if parts > MAX_PARTS:
            raise SchemaRefused(f"its schema expands to more than {MAX_PARTS} parts")
