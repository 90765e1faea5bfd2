"""A tool's result as MCP carries it: the text that a model reads, and all of it for programs."""

from mcp_types import CallToolResult, TextContent

from contract.calls import ToolResult
from contract.errors import ErrorCode

SESSION_META = "toolcrew/session"
"""In `_meta` of a call: the session that it is for; in that of its result: the one that it was made in."""
_REDIS_AWAY = "the pool's Redis does not answer, or does not do it: try again in a moment"


def build_answer(result: ToolResult, session: str | None) -> CallToolResult:
    """The answer to `tools/call`. `session`: told when it is open after the call; None: it is not, or there was
    none.
    """
    if result.error_code is ErrorCode.BROKER_UNAVAILABLE:
        # Where it is, is not the client's to know.
        result = result.model_copy(update={"error": _REDIS_AWAY})
    text = result.text()
    whole = result.model_dump(mode="json", include={"success", "error_code", "truncated", "spill", "metadata"})
    return CallToolResult(
        content=[TextContent(text=text)],
        structured_content={"text": text, **whole},
        is_error=not result.success,
        _meta={SESSION_META: session} if session is not None else None,
    )
