"""Texts of a script with placeholders that a request fills: `{{item}}`, `{{observation|last_line}}`,
`{{match.NAME}}`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

NAMES = ("item", "step", "attempt", "observation", "user", "match.NAME")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Only placeholders in the form of a name are replaced. Doubled braces of programs and of JSON are unchanged.
_PLACE = re.compile(r"\{\{\s*(?P<name>[a-z_]+(?:\.\w+)?)\s*(?:\|\s*(?P<filter>[a-z_]+)\s*)?\}\}")


class TemplateError(ValueError):
    """A placeholder that cannot be filled. The message names the valid placeholders."""


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "").strip()


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()


def _first_number(text: str) -> str:
    found = _NUMBER.search(text)
    if found is None:
        raise TemplateError(f"there is no number in {text[:80]!r}: match the observation before you take its number")
    return found.group()


FILTERS: Mapping[str, Callable[[str], str]] = {
    "strip": str.strip,
    "first_line": _first_line,
    "last_line": _last_line,
    "number": _first_number,
    "int": _first_number,
}
"""`int`: a placeholder that is the whole of a JSON text becomes a JSON number."""


def find_unknown_places(value: JsonValue, groups: frozenset[str]) -> list[str]:
    """Return a sentence for each placeholder that no request could fill. `groups`: the named groups of the rule's
    `observation`.
    """
    if isinstance(value, str):
        return [result for place in _PLACE.finditer(value) if (result := _judge(place, groups)) is not None]
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [result for part in below for result in find_unknown_places(part, groups)]


def _judge(place: re.Match[str], groups: frozenset[str]) -> str | None:
    name, filtered = place["name"], place["filter"]
    if filtered is not None and filtered not in FILTERS:
        return f"{place.group()}: there is no filter {filtered!r}, take one of {', '.join(FILTERS)}"
    head, _, group = name.partition(".")
    if head == "match" and group:
        named = f"(?P<{group}>...)"
        return (
            None
            if group in groups
            else f"{place.group()}: name the group in when.observation of the same rule: {named}"
        )
    return None if name in NAMES else f"{place.group()}: there is no {name!r}, take one of {', '.join(NAMES)}"


def fill(value: JsonValue, values: Mapping[str, str]) -> Any:
    """Return the value with every placeholder filled, also inside lists and objects. Raises TemplateError."""
    if isinstance(value, str):
        return _fill_text(value, values) if "{{" in value else value
    if isinstance(value, dict):
        return {key: fill(part, values) for key, part in value.items()}
    return [fill(part, values) for part in value] if isinstance(value, list | tuple) else value


def _fill_text(text: str, values: Mapping[str, str]) -> str | int | float:
    only = _PLACE.fullmatch(text)
    if only is not None and only["filter"] == "int":
        number = _value(only, values)
        return float(number) if "." in number else int(number)
    # A function, because the inserted text may contain backslashes and braces.
    return _PLACE.sub(lambda place: _value(place, values), text)


def _value(place: re.Match[str], values: Mapping[str, str]) -> str:
    # Groups that took no part in the match have no value.
    value = values.get(place["name"], "")
    return FILTERS[place["filter"]](value) if place["filter"] else value
