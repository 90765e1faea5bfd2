"""Requests that search: names by glob, contents by regular expression."""

from __future__ import annotations

from guest.fields import GuestRequest, choice, optional, read_any_text, read_flag, read_text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

MAX_PATHS = 2000
MAX_MATCHES = 1000
MAX_CONTEXT = 20


class GlobRequest(GuestRequest):
    """Request for the paths below `path` that match `pattern`: the `limit` newest ones, at most `max_bytes` of text.

    `live_bytes`: above 0, also send the first matches as they are found, in the stream `found` of at most so many
    bytes.
    """

    OP: ClassVar = "glob"
    SERVER: ClassVar = ("guest.search.glob_search", "glob")
    FIELDS: ClassVar = {
        "pattern": read_any_text,
        "path": read_text,
        "kind": choice("file", "dir", "any"),
        "limit": whole(1, MAX_PATHS),
        "include_ignored": read_flag,
        "max_bytes": whole(0),
        "live_bytes": whole(0, default=0),
    }
    pattern: str
    path: str
    kind: str
    limit: int
    include_ignored: bool
    max_bytes: int
    live_bytes: int


class GrepRequest(GuestRequest):
    """Request for lines that match `pattern` in files below `path`.

    The answer has at most `limit` matches, `max_lines` lines and `max_bytes` bytes of text.
    """

    OP: ClassVar = "grep"
    SERVER: ClassVar = ("guest.search.grep_search", "grep")
    FIELDS: ClassVar = {
        "pattern": read_any_text,
        "path": read_text,
        "include": optional(read_text),
        "exclude": optional(read_text),
        "type": optional(read_text),
        "ignore_case": read_flag,
        "fixed_strings": read_flag,
        "multiline": read_flag,
        "include_ignored": read_flag,
        "before": whole(0, MAX_CONTEXT, default=0),
        "after": whole(0, MAX_CONTEXT, default=0),
        "mode": choice("content", "files", "count"),
        "limit": whole(1, MAX_MATCHES),
        "max_per_file": optional(whole(1)),
        "max_bytes": whole(0),
        "max_lines": whole(1),
    }
    pattern: str
    path: str
    include: str | None
    exclude: str | None
    type: str | None
    ignore_case: bool
    fixed_strings: bool
    multiline: bool
    include_ignored: bool
    before: int
    after: int
    mode: str
    limit: int
    max_per_file: int | None
    max_bytes: int
    max_lines: int
