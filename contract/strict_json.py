"""Strict parser of one JSON object that a person or a model wrote. It repairs nothing: a repaired text may mean
something else than its author meant, and parsers disagree about repeated keys.
"""

import json
import math
from typing import Any

from toolcrew.contract.json_limits import has_more_values, has_more_values_in_text, is_deeper

_KINDS = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


class InvalidJson(ValueError):
    """The text is not acceptable. `message`: the reason, as a clause. `column`: position of the problem, counted from
    1, if the text is not JSON.
    """

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


def parse_object(
    text: str, max_values: int, max_depth: int | None = None, *, has_raw_controls: bool = False
) -> dict[str, Any]:
    """Return the object. `max_values`: limit of its values, including nested ones. `max_depth`: limit of the nesting;
    None: the limit of Python's parser. `has_raw_controls`: texts may contain line breaks and other control characters
    that are not escaped. Such a character can only mean itself.

    Raises InvalidJson for: invalid JSON, another type, a repeated key, NaN, a number too large for a float, and a text
    beyond the limits.
    """
    # The rough check comes first: the parsed form of a text with many values needs ten times its memory.
    if has_more_values_in_text(text, max_values):
        raise InvalidJson(f"it is nested too deep or has more than {max_values} values: put large content into a file")
    try:
        value = (_RAW_DECODER if has_raw_controls else _DECODER).decode(text)
    except RecursionError:
        raise InvalidJson("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg[0].lower()}{error.msg[1:]}", error.pos + 1) from None
    except ValueError as error:
        raise InvalidJson(str(error)) from None
    if not isinstance(value, dict):
        raise InvalidJson(f"it is {_KINDS[type(value)]} and not an object", 1)
    if has_more_values(value, 2 * max_values):
        raise InvalidJson(f"it is nested too deep or has more than {max_values} values: put large content into a file")
    if max_depth is not None and is_deeper(value, max_depth):
        raise InvalidJson(f"it is nested deeper than {max_depth} levels")
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"the key '{name[:100]}' occurs twice")
            names.add(name)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is a number that is too large")
    return number


_DECODER, _RAW_DECODER = (
    json.JSONDecoder(
        object_pairs_hook=_build_object, parse_constant=_refuse_constant, parse_float=_parse_float, strict=is_strict
    )
    for is_strict in (True, False)
)
