"""Requests that read and write whole files."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure
from guest.fields import check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ReadFileRequest:
    """A whole file of at most `max_bytes`."""

    __slots__ = ("max_bytes", "path", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.max_bytes = read_whole(header, "max_bytes", 0, None)


class WriteFileRequest:
    """The body becomes a file's content, or its end."""

    __slots__ = ("mode", "path", "timeout_s")
    lane = "files"

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "path", "mode")
        self.timeout_s = read_timeout(header)
        self.path = read_text(header, "path")
        self.mode = header.get("mode")
        if self.mode not in ("overwrite", "append", "create"):
            raise Failure(INVALID_ARGUMENTS, "'mode' must be 'overwrite', 'append' or 'create'")
