"""MCP server on the SDK: the handlers of this package, and the checks of every request."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
)

from toolcrew.orchestrator.mcp.calls import Context, McpCaller, call_tool, list_tools

NAME = "toolcrew"
_ABOUT = (
    "Tools that run in a sandbox: files under /workspace and a shell without network unless a tool says otherwise. "
    "Calls of one session share files and the shell's state."
)

FindCaller = Callable[[Context], McpCaller]


def build_server(
    find_caller: FindCaller, *, keys: list[bytes] | None, approval_wait_s: float, audience: str
) -> Server[Any]:
    """Create the server. `keys`: the keys that protect the questions to clients against changes; the first key is used
    for new questions. None: a key of this process only.
    """

    async def on_list_tools(ctx: Context, _params: PaginatedRequestParams | None) -> ListToolsResult:
        return await list_tools(ctx, find_caller(ctx))

    async def on_call_tool(ctx: Context, params: CallToolRequestParams) -> CallToolResult | InputRequiredResult:
        return await call_tool(ctx, params, find_caller(ctx))

    server: Server[Any] = Server(
        NAME,
        version=version("toolcrew"),
        instructions=_ABOUT,
        # The tools' schemas contain no HTTP headers for the SDK to check. Without this function, the SDK would list all
        # tools before every call to look for them.
        get_tool_input_schema=lambda _: None,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )
    server.middleware += [_check_arguments, _seal(find_caller, keys, approval_wait_s, audience)]
    return server


def _seal(
    find_caller: FindCaller, keys: list[bytes] | None, approval_wait_s: float, audience: str
) -> RequestStateBoundary:
    def principal(ctx: Context) -> str:
        return find_caller(ctx).principal

    if keys is None:
        security = RequestStateSecurity.ephemeral(ttl=approval_wait_s)
    else:
        security = RequestStateSecurity(keys=keys, ttl=approval_wait_s, bind_principal=principal)
    return RequestStateBoundary(security, default_audience=audience)


async def _check_arguments(ctx: Context, call_next: CallNext) -> HandlerResult:
    """Refuse an invalid call with the reason. The SDK would refuse it without a reason."""
    if ctx.method == "tools/call":
        params: Mapping[str, Any] = ctx.params or {}
        if not isinstance(params.get("name"), str):
            raise MCPError(INVALID_PARAMS, "tools/call: give the tool's name as a string in `name`")
        if not isinstance(params.get("arguments", {}), Mapping | None):
            raise MCPError(
                INVALID_PARAMS, "tools/call: `arguments` is not an object: send one that maps parameter names to values"
            )
    return await call_next(ctx)
