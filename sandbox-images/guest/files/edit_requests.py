"""Requests that write or change text. What an edit looks for is in the body, which may be longer than a header."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure
from guest.fields import check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MIN_ANSWER_BYTES = 8192
_MODES = ("overwrite", "append", "create")
_TOLERANCES = ("none", "whitespace")


class WriteTextRequest:
    """The body, UTF-8, becomes a file's text or its end; at most `max_bytes` tell what changed."""

    __slots__ = ("encoding", "max_bytes", "mode", "path", "timeout_s")
    lane = "files"

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "mode", "encoding", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.mode = _read_choice(header, "mode", _MODES, "overwrite")
        self.encoding = read_text({"encoding": "auto", **header}, "encoding")
        self.max_bytes = read_whole(header, "max_bytes", MIN_ANSWER_BYTES, None)


class EditTextRequest:
    """The edits of the body, made one after the other, all or none; at most `max_bytes` show the new text."""

    __slots__ = ("expected_count", "max_bytes", "path", "timeout_s", "tolerance")
    lane = "files"

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "expected_count", "tolerance", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.expected_count: int | None = None
        if header.get("expected_count") is not None:
            self.expected_count = read_whole(header, "expected_count", 1, None)
        self.tolerance = _read_choice(header, "tolerance", _TOLERANCES, "none")
        self.max_bytes = read_whole(header, "max_bytes", MIN_ANSWER_BYTES, None)


def _read_choice(header: dict[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = header.get(name, default)
    if value not in choices:
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be one of {', '.join(choices)}")
    return str(value)
