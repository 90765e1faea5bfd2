"""Strict parser of JSON objects that a model wrote. It repairs nothing: a repaired call would run
unrequested things.
"""

import json
from typing import Any

from contract.json_limits import has_more_values_in_text
from contract.schema import MAX_VALUES
from orchestrator.dialects.surrogates import join_surrogates

_JSON_TYPES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def parse_json_object(raw: str, subject: str) -> dict[str, Any]:
    """Parse `raw`, which must be one JSON object.

    Raises ValueError with a sentence about `subject` ("the arguments") for: invalid JSON, another type, NaN, a number
    too large for a float, a repeated key, nesting that is too deep, more than twice MAX_VALUES values.
    """
    be = "are" if subject.endswith("s") else "is"
    if has_more_values_in_text(raw, MAX_VALUES):
        raise ValueError(
            f"{subject} {be} nested too deep or too large: at most {MAX_VALUES} values can be passed, more in a file"
        )
    try:
        value = json.loads(
            raw, parse_constant=_reject_constant, parse_float=_parse_finite, object_pairs_hook=_build_object
        )
        if isinstance(value, dict) and "\\ud" in raw.lower():
            value = _without_lone_surrogates(value)
    except RecursionError:
        raise ValueError(f"{subject} {be} nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{subject} {be} not valid JSON: {join_surrogates(str(error))}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{subject} must be a JSON object, not {_JSON_TYPES[type(value)]}")
    return value


def _without_lone_surrogates(value: dict[str, Any]) -> dict[str, Any]:
    """Replace lone surrogates: their escapes parse, but the strings could not be encoded again."""
    cleaned: dict[str, Any] = json.loads(join_surrogates(json.dumps(value, ensure_ascii=False)))
    return cleaned


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"the key '{name[:100]}' comes twice")
            names.add(name)
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
