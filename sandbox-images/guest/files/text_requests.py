"""The request that reads text by its lines."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure
from guest.fields import check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LINE_CHARS = 2000
"""Of a longer line so many characters are sent; `column` names the first of them."""
MIN_BYTES = 8192
"""What one such line fits into, whatever its characters are."""
MAX_BYTES = 1_048_576
"""A page is in memory before it is sent."""
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
    "width": 0,
    "height": 0,
    "entries": 0,
}
"""The done fields of the request; every answer has all of them."""


class ReadTextRequest:
    """Lines `offset` to `offset + limit - 1` of a text file, the first one from `column` on, as far as `max_bytes` of UTF-8 go.

    `encoding` is "auto" or the codec to read with.
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
