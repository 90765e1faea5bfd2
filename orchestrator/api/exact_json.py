"""JSON as it is sent: exactly what there is, also where that is no text that UTF-8 could carry."""

import json
import math
from typing import Any

from fastapi.responses import JSONResponse


class ExactJson(JSONResponse):
    """What a model said may hold half a surrogate pair: it is sent escaped, for whoever decides about a call must see
    what would run.
    """

    def render(self, content: Any) -> bytes:
        return dump_exactly(content)


def dump_exactly(content: Any) -> bytes:
    """In one line. What JSON has no number for (NaN, Infinity) is told as null."""
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
