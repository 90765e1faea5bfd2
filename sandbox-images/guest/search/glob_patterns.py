"""Match paths with glob patterns.

`*`, `?` and `[...]` match within one part of a path. `**` as a part matches any number of parts. `{a,b}` is expanded
first. `[abc]` and `{abc}` also match the names that are written so. A pattern without a slash applies to names at any
depth, as in a gitignore file.
"""

from __future__ import annotations

import itertools
import re

from guest.failures import INVALID_PATTERN, RequestFailure
from guest.fields import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PATTERN_CHARS = 4096
_MAX_ALTERNATIVES = 512
_MAX_EXPANDED_CHARS = 65_536
_MAGIC = re.compile(r"[*?\[{\\]")
# Regular expression for a pair of braces without another pair inside.
_BRACES = re.compile(r"(?<!\\)\{((?:[^{}\\]|\\.)*)\}", re.DOTALL)
_COMMA = re.compile(r"(?<!\\),")
_COMMA_OF_LIST = re.compile(r"(?<!\\),(?![^{]*\})")
_TOKEN = re.compile(r"\\(?P<escaped>.)|\[(?P<negated>[!^]?)(?P<members>\]?[^\]]*)\]|(?P<other>.)", re.DOTALL)
# Characters that are special in `[...]` of a regular expression, but not in `[...]` of a glob.
_OF_CLASS = re.compile(r"[\\\[\]^&~|]")


class Globs:
    """A set of glob patterns for paths below the start of a search. A path matches if one pattern matches.

    `names`: the last parts of the patterns; the name of a matching path always matches one of them. `accept_all`: True
    if every path matches.
    """

    def __init__(self, texts: list[str], subject: str, flags: int = 0) -> None:
        """Compile the patterns. `subject`: what error messages call them. Raises RequestFailure."""
        self._texts = texts
        self._subject = subject
        self.has_folders = any("/" in text for text in texts)
        self.names: list[str] = []
        self.accept_all = False
        regexes = []
        for text in texts:
            try:
                for pattern in _expand_braces(text):
                    parts = _split(pattern)
                    self.names.append(parts[-1])
                    self.accept_all = self.accept_all or parts in (["**", "**"], ["**", "*"])
                    regexes.append(_join(parts))
                self._match: Callable[[str], object] = re.compile("|".join(regexes), re.DOTALL | flags).fullmatch
            except (re.error, RecursionError, OverflowError) as error:
                raise RequestFailure(INVALID_PATTERN, f"{subject} '{_shorten(text)}': {error}") from None

    def match(self, path: str) -> bool:
        return self._match(path) is not None

    def ignoring_case(self) -> Globs:
        """Return the same patterns, which match in any case."""
        return Globs(self._texts, self._subject, re.IGNORECASE)


def has_magic(text: str) -> bool:
    """Return whether a part of a pattern contains special characters."""
    return _MAGIC.search(text) is not None


def split_list(text: str) -> list[str]:
    """Return the items of a comma-separated list. A comma in braces or after a backslash does not separate items."""
    return [item.strip() for item in _COMMA_OF_LIST.split(text) if item.strip()]


def _expand_braces(pattern: str) -> list[str]:
    """Return the patterns that `{a,b}` stands for. Raises re.error."""
    done, pending = [], [pattern]
    while pending:
        text = pending.pop()
        braces = _BRACES.search(text)
        if braces is None:
            done.append(text)
        else:
            head, tail = text[: braces.start()], text[braces.end() :]
            options = _COMMA.split(braces[1])
            pending += [head + option + tail for option in options]
            if len(options) == 1:
                # Braces around one name, such as `{slug}`, are usually the name of a folder.
                pending.append(f"{head}\\{{{braces[1]}\\}}{tail}")
        count = len(done) + len(pending)
        if count > _MAX_ALTERNATIVES or (count > 1 and count * len(text) > _MAX_EXPANDED_CHARS):
            raise re.error("too many alternatives in braces")
    return done


def _split(pattern: str) -> list[str]:
    """Split a pattern into parts. A pattern without a slash gets `**` in front, and a pattern for a folder gets `**` at
    the end.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if not parts:
        raise re.error("the pattern contains no name")
    if "/" not in pattern.rstrip("/"):
        parts.insert(0, "**")
    return [*parts, "**"] if pattern.endswith("/") else parts


def _join(parts: list[str]) -> str:
    """Return the regular expression for a path, from groups of parts separated by `**`. Raises re.error.

    For each group except the last, only the first position where it matches must be tried. So these groups are atomic,
    and the time to match is almost always linear.
    """
    groups = [
        [_translate(part) for part in group]
        for is_separator, group in itertools.groupby(parts, lambda part: part == "**")
        if not is_separator
    ]
    if "**" not in parts:
        return "/".join(groups[0])
    head = "/".join(groups.pop(0)) + "/" if parts[0] != "**" else ""
    tail = "(?:[^/]+/)*" + "/".join(groups.pop()) if parts[-1] != "**" else ".+"
    middle = "".join(f"(?>(?:[^/]+/)*?{'/'.join(group)}/)" for group in groups)
    return head + middle + tail


def _translate(part: str) -> str:
    """Return the regular expression for one part of a path. Raises re.error."""
    pieces = [""]
    for token in _TOKEN.finditer(part):
        if token["escaped"] is not None:
            pieces[-1] += re.escape(token["escaped"])
        elif token["members"] is not None:
            members = _OF_CLASS.sub(r"\\\g<0>", token["members"])
            # The text in brackets also matches itself, because many projects name folders like `[slug]`.
            one_char = f"[^/{members}]" if token["negated"] else f"[{members}]"
            pieces[-1] += f"(?:{one_char}|{re.escape(token[0])})"
        elif token["other"] == "*":
            pieces.append("")
        elif token["other"] in ("[", "{", "\\"):
            raise re.error(f"put \\ before a {token['other']} that is literal text")
        else:
            pieces[-1] += "[^/]" if token["other"] == "?" else re.escape(token["other"])
    if len(pieces) == 1:
        return pieces[0]
    # Between two stars, only the first position where the piece matches must be tried.
    middle = "".join(f"(?>[^/]*?{piece})" for piece in pieces[1:-1] if piece)
    return f"{pieces[0]}{middle}[^/]*{pieces[-1]}"


def _shorten(text: str) -> str:
    return escaped((text if len(text) <= 200 else f"{text[:200]}...").encode("utf-8", "backslashreplace"))
