"""Schemas from MCP servers and tenants.

This module limits and cleans such schemas before they are used in requests to models and in checks of arguments.

Invariant: a foreign schema has limited size, depth and checking time, and no characters that a person cannot see.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jsonschema.exceptions import SchemaError

from toolcrew.contract.schema import applied_schemas, check_schema, count_parts
from toolcrew.workers.schema_conversion import Converter, Cut, TooLarge
from toolcrew.workers.web.fences import printable

MAX_RECEIVED_BYTES = 256 * 1024
MAX_SCHEMA_BYTES = 16 * 1024
MAX_SCHEMA_DEPTH = 24
MAX_PARTS = 2000
"""Limit of the work of one check of arguments: the number of subschemas, plus the number of values in their lists."""
HIDDEN = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Characters that are invisible to a person but not to a model, and characters that change the order of text."""
_CUTS = (
    Cut(depth=MAX_SCHEMA_DEPTH),
    Cut(depth=MAX_SCHEMA_DEPTH, text_chars=300),
    Cut(depth=MAX_SCHEMA_DEPTH, text_chars=100, repeats=0),
    Cut(depth=MAX_SCHEMA_DEPTH, text_chars=100, repeats=0, references=3),
    Cut(depth=12, text_chars=60, repeats=0, references=2),
    Cut(depth=8, text_chars=60, references=1, has_values=False),
    Cut(depth=4, text_chars=30, references=1, has_values=False),
    Cut(depth=3, text_chars=0, references=0, has_values=False),
)
"""What is kept of a schema. The first one whose result is within the limits is used: descriptions are shortened before
structure is lost.
"""


class SchemaRefused(Exception):
    """Error for a schema that is not accepted. The message is for the operator."""


def bound_schema(received: Any) -> dict[str, Any]:
    """Return the schema of an object in draft 2020-12 within the limits above. Raises SchemaRefused."""
    # PHP writes an empty object as an empty list.
    received = {} if received is None or received is True or received == [] else received
    _check_object(received)
    try:
        text = json.dumps(received, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise SchemaRefused("its schema is not valid JSON") from None
    if len(text.encode("utf-8", "replace")) > MAX_RECEIVED_BYTES:
        raise SchemaRefused(f"its schema is larger than {MAX_RECEIVED_BYTES} bytes")
    _check_headers(received)
    for cut in _CUTS:
        with suppress(TooLarge):
            schema = Converter(received, cut, _clean).convert()
            if _is_within_limits(schema):
                return _checked(schema)
    raise SchemaRefused(f"its schema has more than {MAX_SCHEMA_BYTES} bytes or {MAX_PARTS} parts, even when it is cut")


def _check_object(received: Any) -> None:
    kinds = received.get("type") if isinstance(received, dict) else "none"
    names = [kind.lower() for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    if names and not {"object", "any", "dict", "map"} & set(names):
        raise SchemaRefused("its parameters are not an object")


def _clean(text: str) -> str:
    return HIDDEN.sub("\ufffd", printable(text))


def _is_within_limits(schema: Mapping[str, Any]) -> bool:
    if len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        return False
    # Without references, no part is repeated.
    return sum(count_parts(part) for part, _ in applied_schemas(schema)) <= MAX_PARTS


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema. Raises SchemaRefused if it is not valid, or has invisible characters in names or values."""
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and _clean(value) != value:
            raise SchemaRefused("a name or a value in its schema has invisible characters")
        pending += (
            [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
    try:
        check_schema(schema)
    except SchemaError as error:
        raise SchemaRefused(f"its schema is invalid: {printable(error.message)[:200]}") from None
    return schema


def _check_headers(schema: Any) -> None:
    """Raise SchemaRefused for a schema that needs parameters in headers. Uses no recursion, because any depth is
    possible here.
    """
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "x-mcp-header" in value:
                raise SchemaRefused("it needs parameters in headers, which are not sent")
            pending += value.values()
        elif isinstance(value, list):
            pending += value
