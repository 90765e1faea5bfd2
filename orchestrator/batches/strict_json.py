"""Strict reader for one line of JSON: one object, no duplicate key, no NaN, no single surrogates. Also finds the
column of a value.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from contract.json_limits import has_more_values, has_more_values_in_text

MAX_DEPTH = 64
MAX_VALUES = 20_000
"""Maximum number of values in one object, including nested values."""
_TOO_MANY = f"it has more than {MAX_VALUES} values: put what is large into a file of the workspace"

Path = tuple[str | int, ...]
"""Keys and indices from the outermost object to a value."""

_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]:,]|[^\s"{}\[\]:,]+')
_NO_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^"{}\[\]]++')
_INNERMOST = re.compile(r"\{\}|\[\]")
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


class NotStrict(Exception):
    """The text is not acceptable. The message is a sentence. `column`: position of the problem, counted from 1."""

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


@dataclass(frozen=True)
class Place:
    """Position at which a key or a value starts."""

    path: Path
    column: int
    is_key: bool
    word: str


def parse_object(text: str) -> dict[str, Any]:
    """Return the object of a line. Raises NotStrict."""
    # The cheap checks come first: a deeply nested or very large text must not reach the recursive parser.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(text)
    if has_more_values_in_text(text, MAX_VALUES):
        raise NotStrict(_TOO_MANY)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise NotStrict(_sentence(error, text), error.pos + 1) from None
    except _Doubled as doubled:
        raise NotStrict(f"the key '{doubled}' is there twice in one object: leave one", _find_doubled(text)) from None
    except _Infinite as number:
        column = next(
            (place.column for place in walk_places(text) if not place.is_key and _is_infinite(place.word)), None
        )
        raise NotStrict(f"{number} is no number of JSON: write null, or a finite number", column) from None
    except ValueError as error:
        raise NotStrict(f"a number cannot be read ({error}): write it as a string", None) from None
    if not isinstance(value, dict):
        raise NotStrict(f"this is {_kind(value)}: every line is one object", 1)
    if has_more_values(value, MAX_VALUES):
        raise NotStrict(_TOO_MANY)
    if "\\u" in text:
        _check_characters(text)
    return value


def find_columns(text: str, paths: Iterable[Path]) -> list[int | None]:
    """Return the column at which the value at each path starts. `text`: a line that has been parsed.

    For a missing value, return the column of the nearest existing object or list around the value.
    """
    wanted = list(paths)
    around = {path[:depth] for path in wanted for depth in range(len(path) + 1)}
    columns: dict[Path, int] = {}
    for place in walk_places(text):
        if not place.is_key and place.path in around:
            columns.setdefault(place.path, place.column)
    return [
        next((columns[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in columns), None)
        for path in wanted
    ]


def walk_places(text: str) -> Iterator[Place]:
    """Yield every key and value of a text in order. Stops at the first token that is not JSON."""
    kinds: list[str] = []
    steps: list[str | int] = []
    expects_key = False
    for token in _TOKEN.finditer(text):
        word, column = token[0], token.start() + 1
        if word in ("}", "]"):
            if not kinds:
                return
            kinds.pop()
            steps.pop()
            expects_key = False
        elif word == ",":
            if not kinds:
                return
            expects_key = kinds[-1] == "{"
            if not expects_key:
                steps[-1] = int(steps[-1]) + 1
        elif expects_key and word != ":":
            steps[-1] = _key(word)
            expects_key = False
            yield Place(tuple(steps), column, True, word)
        elif word != ":":
            yield Place(tuple(steps), column, False, word)
            if word in ("{", "["):
                kinds.append(word)
                steps.append("" if word == "{" else 0)
                expects_key = word == "{"


class _Doubled(Exception):
    """A key that occurs twice in one object."""


class _Infinite(Exception):
    """A number that JSON does not allow."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Raises _Doubled: a key occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        raise _Doubled(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return made


def _refuse(word: str) -> NoReturn:
    """Raise _Infinite for NaN and Infinity."""
    raise _Infinite(word)


def _finite(word: str) -> float:
    """Return the number. Raises _Infinite: the number is too large for a float."""
    number = float(word)
    if not math.isfinite(number):
        raise _Infinite(word)
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)


def _is_infinite(word: str) -> bool:
    """Return whether the token is a number without a finite value."""
    try:
        return not word.startswith('"') and not math.isfinite(float(word))
    except ValueError:
        return False


def _check_depth(text: str) -> None:
    """Raise NotStrict for a text that is nested too deeply. A text that is not JSON may pass."""
    brackets = _NO_BRACKET.sub("", text)
    # Remove brackets from the inside out: a walk over the tokens takes four times as long.
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = _INNERMOST.sub("", brackets)
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("{", "["):
            depth += 1
            if depth > MAX_DEPTH:
                raise NotStrict(f"the JSON is nested deeper than {MAX_DEPTH}: make it flatter", token.start() + 1)
        elif token[0] in ("}", "]"):
            depth -= 1


def _check_characters(text: str) -> None:
    """Raise NotStrict for half of a surrogate pair. UTF-8 cannot encode such a half."""
    for escape in _ESCAPE.finditer(text):
        if escape[1] is not None:
            raise NotStrict(
                f"{escape[1]} is half a character: write both halves, or the character itself", escape.start() + 1
            )


def _find_doubled(text: str) -> int | None:
    """Return the column of the first duplicate key."""
    seen: set[Path] = set()
    for place in walk_places(text):
        if place.is_key:
            if place.path in seen:
                return place.column
            seen.add(place.path)
    return None


def _key(word: str) -> str:
    """Return the text of a key token."""
    try:
        return str(json.loads(word))
    except ValueError:
        return word


def _kind(value: object) -> str:
    """Return the kind of a value for a message."""
    names = {
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names[type(value)]


def _sentence(error: json.JSONDecodeError, text: str) -> str:
    """Return the message for a text that is not JSON."""
    rest = text[error.pos :].strip()
    if error.msg == "Extra data":
        return "something follows the object: a line holds one object and nothing else"
    if text.strip() in ("[", "{") or (not rest and text.lstrip().startswith(("{", "["))):
        return (
            "the JSON is not whole at the end of the line: write each object on one line (`jq -c .` does, `jq -c "
            "'.[]'` of a list)"
        )
    return f"this is no JSON ({error.msg[0].lower()}{error.msg[1:]}): mend it"
