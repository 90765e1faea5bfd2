"""Requests that read, write and edit files."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, RequestFailure
from guest.fields import GuestRequest, choice, optional, read_text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

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
_MODE = choice("overwrite", "append", "create", default="overwrite")


def _read_encoding(header: dict[str, Any], name: str) -> str:
    encoding = read_text({name: "auto", **header}, name)
    if not encoding.isascii():
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be auto or the name of a codec")
    return encoding


class ReadFileRequest(GuestRequest):
    """Request for a whole file of at most `max_bytes`."""

    OP: ClassVar = "read_file"
    SERVER: ClassVar = ("guest.files.file_reads", "read_file")
    FIELDS: ClassVar = {"path": read_text, "max_bytes": whole(0)}
    path: str
    max_bytes: int


class _WriteRequest(GuestRequest):
    @property
    def lane(self) -> str:
        """Return the lane of all requests that write files."""
        return "files"


class WriteFileRequest(_WriteRequest):
    """Request to write the body to a file, or to append the body."""

    OP: ClassVar = "write_file"
    SERVER: ClassVar = ("guest.files.file_writes", "write_file")
    FIELDS: ClassVar = {"path": read_text, "mode": choice("overwrite", "append", "create")}
    path: str
    mode: str


class ReadTextRequest(GuestRequest):
    """Request for lines `offset` to `offset + limit - 1` of a text file.

    The first line starts at `column`. The answer has at most `max_bytes` bytes of UTF-8. `encoding` is "auto" or a
    codec.
    """

    OP: ClassVar = "read_text"
    SERVER: ClassVar = ("guest.files.text_reads", "read_text")
    FIELDS: ClassVar = {
        "path": read_text,
        "offset": whole(1),
        "limit": whole(1, MAX_LINES),
        "column": whole(1, default=1),
        "encoding": _read_encoding,
        "max_bytes": whole(MIN_BYTES, MAX_BYTES),
    }
    path: str
    offset: int
    limit: int
    column: int
    encoding: str
    max_bytes: int


class WriteTextRequest(_WriteRequest):
    """Request to write or append the body, which is UTF-8 text.

    The answer describes the change in at most `max_bytes`.
    """

    OP: ClassVar = "write_text"
    SERVER: ClassVar = ("guest.files.text_writes", "write_text")
    FIELDS: ClassVar = {
        "path": read_text,
        "mode": _MODE,
        "encoding": _read_encoding,
        "max_bytes": whole(MIN_ANSWER_BYTES),
    }
    path: str
    mode: str
    encoding: str
    max_bytes: int


class EditTextRequest(_WriteRequest):
    """Request to apply the edits in the body in order: all of them or none.

    The answer shows the new text in at most `max_bytes`.
    """

    OP: ClassVar = "edit_text"
    SERVER: ClassVar = ("guest.files.edits", "edit_text")
    FIELDS: ClassVar = {
        "path": read_text,
        "expected_count": optional(whole(1)),
        "tolerance": choice("none", "whitespace", default="none"),
        "max_bytes": whole(MIN_ANSWER_BYTES),
    }
    path: str
    expected_count: int | None
    tolerance: str
    max_bytes: int
