"""Translate glob patterns to regular expressions.

The regular expressions match in almost always linear time in the length of a name. `*`, `?` and `[...]` match within
one part of a path. `**` as a part matches any number of parts. `{a,b}` is expanded before the translation.
"""

from __future__ import annotations

import re

from guest.failures import INVALID_PATTERN, Failure
from guest.files.suggestions import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Match = Callable[[str], object]

MAX_PATTERN_CHARS = 4096
_MAX_ALTERNATIVES = 512
_MAX_EXPANDED_CHARS = 65_536
MAX_REGEX_CHARS = 131_072
"""Maximum length of a regular expression, in characters. A longer expression takes seconds to compile."""
# Cost of compiling a character class, expressed as a number of characters.
_CLASS_COST = 500
# An atomic group is never backtracked into: backtracking would find no further matches and cost time.
_ONCE = "(?>"
_MAGIC = re.compile(r"[*?\[{\\]")


class BadGlob(Exception):
    """Raised for an invalid pattern. `position` counts characters from 1."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position

    def as_failure(self, what: str, pattern: str) -> Failure:
        shown = escaped((pattern if len(pattern) <= 200 else f"{pattern[:200]}...").encode("utf-8", "backslashreplace"))
        message = (
            f"{what} '{shown}': {self.reason} at character {self.position}; put \\ before a character that is meant as "
            "it is"
        )
        return Failure(INVALID_PATTERN, message)


class TooLarge(BadGlob):
    """Raised for a valid pattern that would take too much time."""


class Glob:
    """Glob pattern without braces.

    `name_only`: the pattern applies to the last part of a path, at any depth. Otherwise it applies to the whole path.
    """

    __slots__ = ("name_only", "parts", "regex")

    def __init__(self, pattern: str, any_depth: bool) -> None:
        """Translate the pattern. Raises BadGlob.

        `any_depth`: a pattern with one part matches at any depth, as in a gitignore file.
        """
        self.parts = [part for part in pattern.split("/") if part not in ("", ".")]
        wide = self.parts[0] == "**" if len(self.parts) == 2 else any_depth and len(self.parts) == 1
        self.name_only = wide and self.parts[-1:] != ["**"]
        regexes = [_translate_in(pattern, part) for part in self.parts]
        self.regex = regexes[-1] if self.name_only else _join(self.parts, regexes)


def has_magic(text: str) -> bool:
    """Return whether a part of a pattern contains special characters."""
    return _MAGIC.search(text) is not None


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that `{a,b}` stands for. Braces may be nested. Raises BadGlob."""
    done, pending = [], [pattern]
    while pending:
        text = pending.pop()
        span = _find_braces(text)
        if span is None:
            done.append(text)
        else:
            opening, commas, closing = span
            edges = [opening, *commas, closing]
            options = [text[low + 1 : high] for low, high in zip(edges, edges[1:])]
            pending += [text[:opening] + option + text[closing + 1 :] for option in reversed(options)]
        count = len(done) + len(pending)
        if count > _MAX_ALTERNATIVES or (count > 1 and count * len(text) > _MAX_EXPANDED_CHARS):
            raise TooLarge("too many alternatives in braces", pattern.find("{") + 1)
    return done


def compile_any(regexes: list[str], what: str) -> Match | None:
    """Return a function that tests whether a text matches any of the regular expressions, or None without any.

    Raises Failure if the regular expressions are too large together.
    """
    joined = "|".join(f"(?:{regex})" for regex in regexes)
    if len(joined) + _CLASS_COST * (joined.count("[") - joined.count("[^/]")) > MAX_REGEX_CHARS:
        raise Failure(
            INVALID_PATTERN,
            f"{what} is too large, with all its alternatives and classes: ask for a part of it at a time",
        )
    return re.compile(joined, re.DOTALL).fullmatch if regexes else None


def split_list(text: str) -> list[str]:
    """Return the items of a comma-separated list. A comma in braces or after a backslash does not separate items."""
    items, depth, start, at = [], 0, 0, 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "{}":
            depth = max(0, depth + (1 if char == "{" else -1))
        elif char == "," and depth == 0:
            items.append(text[start:at])
            start = at + 1
        at += 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def translate_part(part: str) -> str:
    """Return the regular expression for one part of a path. Raises BadGlob."""
    pieces = [""]
    at = 0
    while at < len(part):
        char = part[at]
        if char == "*":
            pieces.append("")
            at += 1
            continue
        if char == "[":
            regex, at = _translate_class(part, at)
        elif char == "\\":
            if at + 1 == len(part):
                raise BadGlob("a backslash with nothing after it", at + 1)
            regex, at = re.escape(part[at + 1]), at + 2
        else:
            regex, at = "[^/]" if char == "?" else re.escape(char), at + 1
        pieces[-1] += regex
    if len(pieces) == 1:
        return pieces[0]
    # The first possible position of each piece between two stars is always sufficient, so backtracking is not needed.
    middle = "".join(f"{_ONCE}[^/]*?{piece})" for piece in pieces[1:-1] if piece)
    return f"{pieces[0]}{middle}[^/]*{pieces[-1]}"


def _translate_in(pattern: str, part: str) -> str:
    """Return the result of `translate_part`. Positions in errors count from the start of the pattern."""
    try:
        return translate_part(part)
    except BadGlob as error:
        raise BadGlob(error.reason, pattern.find(part) + error.position) from None


def _join(parts: list[str], regexes: list[str]) -> str:
    """Return the regular expression for a whole path, from groups of parts separated by `**`.

    The first possible position of each group except the last is always sufficient, so those groups are atomic.
    """
    groups: list[list[str]] = [[]]
    for part, regex in zip(parts, regexes):
        if part == "**":
            groups.append([])
        else:
            groups[-1].append(regex)
    if len(groups) == 1:
        return "/".join(groups[0])
    head = "/".join(groups[0]) + "/" if groups[0] else ""
    middle = "".join(f"{_ONCE}(?:[^/]+/)*?{'/'.join(group)}/)" for group in groups[1:-1] if group)
    tail = "(?:[^/]+/)*" + "/".join(groups[-1]) if groups[-1] else ".+"
    return head + middle + tail


def _translate_class(part: str, opening: int) -> tuple[str, int]:
    """Return the regular expression of the class that opens at `opening`, and the position after the class."""
    at = opening + 1
    is_negated = part[at : at + 1] in ("!", "^")
    at += is_negated
    members = ""
    first = at
    while part[at : at + 1] != "]" or at == first:
        low, at = _read_member(part, at, opening)
        if part[at : at + 1] == "-" and part[at + 1 : at + 2] not in ("", "]"):
            high, at = _read_member(part, at + 1, opening)
            if high < low:
                raise BadGlob(f"a range that runs backwards, {low}-{high}, in the class", opening + 1)
            members += f"{re.escape(low)}-{re.escape(high)}"
        else:
            members += re.escape(low)
    return (f"[^/{members}]" if is_negated else f"[{members}]"), at + 1


def _read_member(part: str, at: int, opening: int) -> tuple[str, int]:
    if part[at : at + 1] == "\\":
        at += 1
    if at >= len(part):
        raise BadGlob("a class that is not closed with ]", opening + 1)
    return part[at], at + 1


def _find_braces(text: str) -> tuple[int, list[int], int] | None:
    """Return the first outer pair of braces and the commas directly inside.

    Raises BadGlob if the braces are not closed.
    """
    depth, opening, at = 0, -1, 0
    commas: list[int] = []
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "[":
            at = _skip_class(text, at)
        elif char == "{":
            opening = at if depth == 0 else opening
            depth += 1
        elif char == "}" and depth:
            depth -= 1
            if depth == 0:
                return opening, commas, at
        elif char == "," and depth == 1:
            commas.append(at)
        at += 1
    if depth:
        raise BadGlob("braces that are not closed with }", opening + 1)
    return None


def _skip_class(text: str, opening: int) -> int:
    """Return the index of the bracket that closes a class, or `opening` if no bracket does."""
    at = opening + 1
    at += text[at : at + 1] in ("!", "^")
    closing = text.find("]", at + 1)
    return closing if closing >= 0 else opening
