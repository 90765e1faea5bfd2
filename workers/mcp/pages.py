"""A list of tools that comes in pages, gathered within bounds."""

from collections.abc import Callable, Mapping
from typing import Any

from workers.mcp.messages import broken

MAX_PAGES = 20
MAX_LISTED = 2000
MAX_CURSOR_CHARS = 4096


def gather_pages(server: str, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[Any]:
    """What the server lists. `ask`: a tools/list with these parameters. Raises ToolFailure(HTTP_ERROR), and what `ask`
    raises.
    """
    listed: list[Any] = []
    params: dict[str, Any] = {}
    for _ in range(MAX_PAGES):
        page = ask(params)
        tools, cursor = page.get("tools"), page.get("nextCursor")
        if not isinstance(tools, list):
            raise broken(server, "its list of tools is none")
        listed += tools
        if len(listed) > MAX_LISTED:
            raise broken(server, f"it lists more than {MAX_LISTED} tools")
        if cursor is None:
            return listed
        if not isinstance(cursor, str) or len(cursor) > MAX_CURSOR_CHARS:
            raise broken(server, "its list of tools cannot be read on")
        params = {"cursor": cursor}
    raise broken(server, f"its list of tools has more than {MAX_PAGES} pages")
