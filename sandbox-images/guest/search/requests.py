"""Requests that search: names by glob, contents by regular expression."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure, check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_PATHS = 2000
MAX_MATCHES = 1000
MAX_CONTEXT = 20


class GlobRequest:
    """Request for names below `path` that match `pattern`: the newest `limit` names, at most `max_bytes` of text."""

    __slots__ = ("include_ignored", "kind", "limit", "max_bytes", "path", "pattern", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "pattern", "path", "kind", "limit", "include_ignored", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.pattern = _read_any_text(header, "pattern")
        self.path = read_text(header, "path")
        self.kind = _read_choice(header, "kind", ("file", "dir", "any"))
        self.limit = read_whole(header, "limit", 1, MAX_PATHS)
        self.include_ignored = _read_flag(header, "include_ignored")
        self.max_bytes = read_whole(header, "max_bytes", 0, None)


class GrepRequest:
    """Request for lines that match `pattern` in files below `path`.

    The answer has at most `limit` matches, `max_lines` lines and `max_bytes` bytes of text.
    """

    __slots__ = (
        "after",
        "before",
        "exclude",
        "fixed_strings",
        "ignore_case",
        "include",
        "include_ignored",
        "limit",
        "max_bytes",
        "max_lines",
        "max_per_file",
        "mode",
        "multiline",
        "path",
        "pattern",
        "timeout_s",
        "type",
    )

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, *self.__slots__)
        self.timeout_s = read_timeout(header)
        self.pattern = _read_any_text(header, "pattern")
        self.path = read_text(header, "path")
        self.include = _read_optional_text(header, "include")
        self.exclude = _read_optional_text(header, "exclude")
        self.type = _read_optional_text(header, "type")
        self.ignore_case = _read_flag(header, "ignore_case")
        self.fixed_strings = _read_flag(header, "fixed_strings")
        self.multiline = _read_flag(header, "multiline")
        self.include_ignored = _read_flag(header, "include_ignored")
        self.before = read_whole(header, "before", 0, MAX_CONTEXT, default=0)
        self.after = read_whole(header, "after", 0, MAX_CONTEXT, default=0)
        self.mode = _read_choice(header, "mode", ("content", "files", "count"))
        self.limit = read_whole(header, "limit", 1, MAX_MATCHES)
        self.max_per_file = (
            read_whole(header, "max_per_file", 1, None) if header.get("max_per_file") is not None else None
        )
        self.max_bytes = read_whole(header, "max_bytes", 0, None)
        self.max_lines = read_whole(header, "max_lines", 1, None)


def _read_flag(header: dict[str, Any], name: str) -> bool:
    value = header.get(name, False)
    if not isinstance(value, bool):
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be true or false")
    return value


def _read_choice(header: dict[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = header.get(name)
    if value not in choices:
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be one of {', '.join(choices)}")
    return str(value)


def _read_any_text(header: dict[str, Any], name: str) -> str:
    """Return a pattern as text.

    A pattern that is empty or contains NUL is reported later, where patterns are checked.
    """
    value = header.get(name)
    if not isinstance(value, str):
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be a string")
    return value


def _read_optional_text(header: dict[str, Any], name: str) -> str | None:
    return None if header.get(name) is None else read_text(header, name)
