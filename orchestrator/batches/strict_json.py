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
_TOO_MANY = f"the object has more than {MAX_VALUES} values: put large content into a file of the workspace"

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
class TokenPosition:
    """Position at which a key or a value starts."""

    path: Path
    column: int
    is_key: bool
    token: str


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
    except _DuplicateKey as duplicate:
        message = f"the key '{duplicate}' occurs twice in one object: remove one"
        raise NotStrict(message, _find_duplicate_key(text)) from None
    except _Infinite as number:
        column = next(
            (position.column for position in walk_tokens(text) if not position.is_key and _is_infinite(position.token)),
            None,
        )
        raise NotStrict(f"{number} is not a JSON number: write null, or a finite number", column) from None
    except ValueError as error:
        raise NotStrict(f"a number cannot be read ({error}): write it as a string", None) from None
    if not isinstance(value, dict):
        raise NotStrict(f"the line is {_describe_type(value)}: write one object per line", 1)
    if has_more_values(value, MAX_VALUES):
        raise NotStrict(_TOO_MANY)
    if "\\u" in text:
        _check_characters(text)
    return value


def find_columns(text: str, paths: Iterable[Path]) -> list[int | None]:
    """Return the column at which the value at each path starts. `text`: a line that has been parsed.

    For a missing value, return the column of the nearest existing object or list around the value.
    """
    requested = list(paths)
    around = {path[:depth] for path in requested for depth in range(len(path) + 1)}
    columns: dict[Path, int] = {}
    for position in walk_tokens(text):
        if not position.is_key and position.path in around:
            columns.setdefault(position.path, position.column)
    return [
        next((columns[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in columns), None)
        for path in requested
    ]


def walk_tokens(text: str) -> Iterator[TokenPosition]:
    """Yield every key and value of a text in order. Stops at the first token that is not JSON."""
    kinds: list[str] = []
    steps: list[str | int] = []
    expects_key = False
    for match in _TOKEN.finditer(text):
        token, column = match[0], match.start() + 1
        if token in ("}", "]"):
            if not kinds:
                return
            kinds.pop()
            steps.pop()
            expects_key = False
        elif token == ",":
            if not kinds:
                return
            expects_key = kinds[-1] == "{"
            if not expects_key:
                steps[-1] = int(steps[-1]) + 1
        elif expects_key and token != ":":
            steps[-1] = _key(token)
            expects_key = False
            yield TokenPosition(tuple(steps), column, True, token)
        elif token != ":":
            yield TokenPosition(tuple(steps), column, False, token)
            if token in ("{", "["):
                kinds.append(token)
                steps.append("" if token == "{" else 0)
                expects_key = token == "{"


class _DuplicateKey(Exception):
    """A key that occurs twice in one object."""


class _Infinite(Exception):
    """A number that JSON does not allow."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object. Raises _Doubled: a key occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return value


def _refuse(token: str) -> NoReturn:
    """Raise _Infinite for NaN and Infinity."""
    raise _Infinite(token)


def _finite(token: str) -> float:
    """Return the number. Raises _Infinite: the number is too large for a float."""
    number = float(token)
    if not math.isfinite(number):
        raise _Infinite(token)
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)


def _is_infinite(token: str) -> bool:
    """Return whether the token is a number without a finite value."""
    try:
        return not token.startswith('"') and not math.isfinite(float(token))
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
                raise NotStrict(f"the JSON is nested deeper than {MAX_DEPTH} levels", token.start() + 1)
        elif token[0] in ("}", "]"):
            depth -= 1


def _check_characters(text: str) -> None:
    """Raise NotStrict for half of a surrogate pair. UTF-8 cannot encode such a half."""
    for escape in _ESCAPE.finditer(text):
        if escape[1] is not None:
            raise NotStrict(
                f"{escape[1]} is half of a surrogate pair: write both halves, or the character itself",
                escape.start() + 1,
            )


def _find_duplicate_key(text: str) -> int | None:
    """Return the column of the first duplicate key."""
    seen: set[Path] = set()
    for position in walk_tokens(text):
        if position.is_key:
            if position.path in seen:
                return position.column
            seen.add(position.path)
    return None


def _key(token: str) -> str:
    """Return the text of a key token."""
    try:
        return str(json.loads(token))
    except ValueError:
        return token


def _describe_type(value: object) -> str:
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
    remainder = text[error.pos :].strip()
    if error.msg == "Extra data":
        return "the line has text after the object: write only one object per line"
    if text.strip() in ("[", "{") or (not remainder and text.lstrip().startswith(("{", "["))):
        return (
            "the JSON is incomplete at the end of the line: write each object on one line (`jq -c .`, or `jq -c "
            "'.[]'` for a list)"
        )
    return f"the line is not JSON ({error.msg[0].lower()}{error.msg[1:]}): fix it"
