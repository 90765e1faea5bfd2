"""Collects a list of tools that a server sends in pages, within limits."""

from collections.abc import Mapping
from typing import Any

from toolcrew.workers.mcp.messages import build_protocol_error

MAX_PAGES = 20
MAX_LISTED = 2000
MAX_CURSOR_CHARS = 4096


class ToolPages:
    """The pages of a list of tools. `listed`: all tools so far. `cursor`: the next page; empty before the first page,
    None after the last page.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._count = 0
        self.listed: list[Any] = []
        self.cursor: str | None = ""

    def add(self, page: Mapping[str, Any]) -> None:
        """Add the result of a tools/list request. Raises ToolFailure(HTTP_ERROR)."""
        self._count += 1
        tools, cursor = page.get("tools"), page.get("nextCursor")
        if not isinstance(tools, list):
            raise build_protocol_error(self._server, "its list of tools is not a list")
        self.listed += tools
        if len(self.listed) > MAX_LISTED:
            raise build_protocol_error(self._server, f"it lists more than {MAX_LISTED} tools")
        if cursor is not None and (not isinstance(cursor, str) or not 0 < len(cursor) <= MAX_CURSOR_CHARS):
            raise build_protocol_error(self._server, "the next page of its list of tools cannot be read")
        if cursor is not None and self._count == MAX_PAGES:
            raise build_protocol_error(self._server, f"its list of tools has more than {MAX_PAGES} pages")
        self.cursor = cursor
