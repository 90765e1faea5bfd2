"""How large and how deep JSON is: counted no further than the limit, so that the time depends on the limit and not on
the sender.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

TEXT_UNIT_CHARS = 4096
"""Characters of a text that count as one value: a failed check copies the text into its message."""

_NEXT = re.compile(r'(?:[^",\[{]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[,\[{]', re.DOTALL)
"""Up to the next comma or opening bracket outside of strings."""


def count_values(value: Any, limit: int) -> int:
    """Return how many values a JSON value holds, itself and those inside of others included; more than `limit` if there
    are more.
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
    """Whether a JSON value holds more than `limit` values."""
    return count_values(value, limit) > limit


def has_more_values_in_text(text: str, limit: int) -> bool:
    """Whether a JSON text holds more than `limit` values. A text with up to twice as many may pass: this is for before
    it is parsed.
    """
    if text.count(",") + text.count("[") + text.count("{") <= 2 * limit:
        return False
    at = 0
    for _ in range(2 * limit + 1):
        found = _NEXT.match(text, at)
        if found is None:
            return False
        at = found.end()
    return True


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects nest deeper than `limit`, without recursion."""
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
