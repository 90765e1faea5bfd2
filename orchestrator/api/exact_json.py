"""Exact JSON encoding, including text that UTF-8 cannot encode."""

import json
import math
from typing import Any

from fastapi.responses import JSONResponse


class ExactJson(JSONResponse):
    """JSON response that escapes lone surrogates.

    The text of a model may contain them. A person who decides about a call must see exactly what would run.
    """

    def render(self, content: Any) -> bytes:
        return dump_exactly(content)


def dump_exactly(content: Any) -> bytes:
    """Encode as one line of JSON. NaN and Infinity, which JSON does not have, become null."""
    try:
        text = _dump(content)
    except ValueError:
        content = _with_numbers_alone(content)
        text = _dump(content)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _dump(content, is_ascii=True).encode()


def _dump(content: Any, *, is_ascii: bool = False) -> str:
    return json.dumps(content, ensure_ascii=is_ascii, separators=(",", ":"), allow_nan=False)


def _with_numbers_alone(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _with_numbers_alone(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_with_numbers_alone(inner) for inner in value]
    return value
