"""Checks of the size and depth of JSON. Counting stops at the limit, so that the time does not depend on the sender."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

TEXT_UNIT_CHARS = 4096
"""Characters of a text that count as one value. Long texts count more, because a failed check copies the text into its
message.
"""

_NEXT = re.compile(r'(?:[^",\[{]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[,\[{]', re.DOTALL)
"""Matches up to the next comma or opening bracket outside of strings."""


def count_values(value: Any, limit: int) -> int:
    """Return the number of values in a JSON value, including itself and nested values. Above `limit` the result is some
    number above `limit`.
    """
    pending, count = [value], 0
    while pending and count + len(pending) <= limit:
        part = pending.pop()
        count += 1
        if isinstance(part, str):
            count += len(part) // TEXT_UNIT_CHARS
        elif isinstance(part, dict | Mapping):
            pending += itertools.islice(part.values(), limit + 1)
        elif isinstance(part, list | tuple):
            pending += itertools.islice(part, limit + 1)
    return count + len(pending)


def has_more_values(value: Any, limit: int) -> bool:
    """Return whether a JSON value has more than `limit` values."""
    return count_values(value, limit) > limit


def has_more_values_in_text(text: str, limit: int) -> bool:
    """Return whether a JSON text has more than `limit` values, before it is parsed. The check is rough: a text with up
    to twice as many values may pass.
    """
    if text.count(",") + text.count("[") + text.count("{") <= 2 * limit:
        return False
    at = 0
    for _ in range(2 * limit + 1):
        match = _NEXT.match(text, at)
        if match is None:
            return False
        at = match.end()
    return True


def is_deeper(value: Any, limit: int) -> bool:
    """Return whether lists and objects nest deeper than `limit`. Uses no recursion, so deep input cannot overflow the
    stack.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return bool(level)
