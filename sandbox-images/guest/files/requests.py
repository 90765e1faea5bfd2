"""Requests that read, write and edit files."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure, check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LINE_CHARS = 2000
"""Maximum number of characters sent of one line. `column` names the first character to send."""
MIN_BYTES = 8192
"""Smallest limit for a page, in bytes. One line of LINE_CHARS characters always fits."""
MAX_BYTES = 1_048_576
"""Largest limit for a page, in bytes. The whole page is in memory before it is sent."""
MAX_LINES = 1_000_000
EMPTY_ANSWER: dict[str, object] = {
    "kind": "text",
    "size": 0,
    "lines": 0,
    "is_counted": True,
    "count": 0,
    "is_out_of_room": False,
    "cuts": [],
    "encoding": "utf-8",
    "has_bom": False,
    "is_guess": False,
    "is_damaged": False,
    "newline": "none",
    "final_newline": True,
    "type": "",
    "entries": 0,
}
"""Fields of the done event of a text read, with default values. Every answer has all of these fields."""
MIN_ANSWER_BYTES = 8192
_MODES = ("overwrite", "append", "create")
_TOLERANCES = ("none", "whitespace")


class ReadFileRequest:
    """Request for a whole file of at most `max_bytes`."""

    __slots__ = ("max_bytes", "path", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.max_bytes = read_whole(header, "max_bytes", 0, None)


class WriteFileRequest:
    """Request to write the body to a file, or to append the body."""

    __slots__ = ("mode", "path", "timeout_s")
    lane = "files"

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "mode")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.mode = header.get("mode")
        if self.mode not in ("overwrite", "append", "create"):
            raise Failure(INVALID_ARGUMENTS, "'mode' must be 'overwrite', 'append' or 'create'")


class ReadTextRequest:
    """Request for lines `offset` to `offset + limit - 1` of a text file.

    The first line starts at `column`. The answer has at most `max_bytes` bytes of UTF-8. `encoding` is "auto" or a
    codec.
    """

    __slots__ = ("column", "encoding", "limit", "max_bytes", "offset", "path", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "offset", "limit", "column", "encoding", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.offset = read_whole(header, "offset", 1, None)
        self.limit = read_whole(header, "limit", 1, MAX_LINES)
        self.column = read_whole(header, "column", 1, None, 1)
        self.encoding = str(header.get("encoding", "auto"))
        self.max_bytes = read_whole(header, "max_bytes", MIN_BYTES, MAX_BYTES)
        if not self.encoding.isascii():
            raise Failure(INVALID_ARGUMENTS, "'encoding' must be auto or the name of a codec")


class WriteTextRequest:
    """Request to write or append the body, which is UTF-8 text.

    The answer describes the change in at most `max_bytes`.
    """

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
    """Request to apply the edits in the body in order: all of them or none.

    The answer shows the new text in at most `max_bytes`.
    """

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
