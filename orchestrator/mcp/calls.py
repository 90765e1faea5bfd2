"""Handlers of `tools/call` and `tools/list` for one caller: find the tool, check and approve the call, send it, and
report its output while it runs.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from mcp.server.context import ServerRequestContext
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    InputRequiredResult,
    ListToolsResult,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import ValidationError

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.functions.json_schemas import complete_schema
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.schema import find_aliases, find_nearest
from toolcrew.contract.specs import NO_NETWORK, ToolSpec
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.dispatch.dispatcher import add_used_aliases
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.mcp.consents import LaterApprover, PendingApproval, build_question, choose_client_approver
from toolcrew.orchestrator.mcp.leases import SessionLeases
from toolcrew.orchestrator.sdk.tenant_client import TenantClient

OUTPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "The text of the result for a model: the same as the text content."},
        "success": {"type": "boolean"},
        "error_code": {
            "type": ["string", "null"],
            "description": "The error code of a failed call, such as TIMEOUT.",
        },
        "truncated": {"type": "boolean", "description": "Whether the text contains only a part of the output."},
        "spill": {
            "type": ["object", "null"],
            "description": "The file in the session that contains the complete output.",
            "properties": {
                "path": {"type": "string"},
                "bytes": {"type": "integer"},
                "lines": {"type": ["integer", "null"]},
            },
            "required": ["path", "bytes"],
        },
        "metadata": {
            "type": "object",
            "description": "Further facts about the result; their names depend on the tool.",
        },
    },
    "required": ["text", "success", "error_code", "truncated", "spill", "metadata"],
}
"""Output schema of every tool: the whole result for programs. The schema includes the text, because some clients show a
model only the structured content.
"""


def build_tool(spec: ToolSpec) -> Tool:
    """Return the tool in MCP's format."""
    return Tool(
        name=spec.name,
        description=spec.description,
        input_schema=complete_schema(spec.parameters),
        output_schema=OUTPUT_SCHEMA,
        annotations=build_hints(spec),
    )


def build_hints(spec: ToolSpec) -> ToolAnnotations:
    """Return the hints about a tool that MCP defines. A tool that only reads gets no hints about changes."""
    # In a sandbox, only commands can use the network.
    reaches_out = spec.pool != "sandbox" or (spec.command_parameter is not None and spec.network != NO_NETWORK)
    if spec.read_only:
        return ToolAnnotations(read_only_hint=True, open_world_hint=reaches_out)
    return ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=spec.idempotent, open_world_hint=reaches_out
    )


SESSION_META = "toolcrew/session"
"""Key in the field `_meta` of MCP messages. In a call: the session in which it must run. In a result: the session in
which it ran.
"""
_REDIS_AWAY = "the pool's Redis does not answer or refuses the command: try again in a moment"


def build_answer(result: ToolResult, session: str | None) -> CallToolResult:
    """Return the response to `tools/call`. `session`: the id of the session if it stays open after the call, else
    None.
    """
    if result.error_code is ErrorCode.BROKER_UNAVAILABLE:
        # The original message contains the address of Redis, which clients must not see.
        result = result.model_copy(update={"error": _REDIS_AWAY})
    text = result.text()
    whole = result.model_dump(mode="json", include={"success", "error_code", "truncated", "spill", "metadata"})
    return CallToolResult(
        content=[TextContent(text=text)],
        structured_content={"text": text, **whole},
        is_error=not result.success,
        _meta={SESSION_META: session} if session is not None else None,
    )


Context = ServerRequestContext[Any, Any]
T = TypeVar("T")

END_S = 10.0
"""Time that a cancelled call has to end its command, in seconds."""
LIST_FRESH_MS = 2000
"""Milliseconds for which a client may cache the list of tools. Disabling a tool takes effect everywhere within this
time.
"""
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class McpCaller:
    """Caller of a request. `principal`: the identity for which an approval is valid. `session`: the session that the
    URL of the request names. `asks_client`: the person at the client decides on approvals; otherwise `approver`
    decides, or with None the approver of `client`.
    """

    client: TenantClient
    leases: SessionLeases
    principal: str
    asks_client: bool
    approver: Approver | None = None
    session: str | None = None


async def list_tools(ctx: Context, caller: McpCaller) -> ListToolsResult:
    """Return the tools that the caller's tenant may call now. If the session is open, the descriptions include its
    network.
    """
    try:
        session = await caller.leases.attached(_requested_session(ctx, caller))
        specs = await caller.client.tools(session=session)
    except (ToolFailure, OperatorError) as error:
        content = build_answer(_build_failure("tools", error), None).structured_content
        raise MCPError(INVALID_PARAMS if isinstance(error, ToolFailure) else -32000, content["text"]) from error
    tools = [build_tool(spec) for spec in sorted(specs, key=lambda spec: spec.name)]
    return ListToolsResult(tools=tools, ttl_ms=LIST_FRESH_MS, cache_scope="private")


async def call_tool(
    ctx: Context, params: CallToolRequestParams, caller: McpCaller
) -> CallToolResult | InputRequiredResult:
    """Return the call's answer, or the question that a person must answer first. A failure is also a result, because
    only the model can react to it.
    """
    try:
        return await _cancel_once(_call(ctx, params, caller))
    except (ToolFailure, OperatorError) as error:
        return build_answer(_build_failure(params.name, error), None)


async def _call(ctx: Context, params: CallToolRequestParams, caller: McpCaller) -> CallToolResult | InputRequiredResult:
    session_id = _requested_session(ctx, caller)
    spec = await _find(caller.client, params.name)
    pending = PendingApproval.parse(params.request_state)
    call = _parse_call(pending.call if pending is not None else secrets.token_hex(16), params)
    approver = choose_client_approver(ctx, params, pending) if caller.asks_client else caller.approver
    reviewed = await caller.client.review(call, spec, session_id, approver)
    if isinstance(approver, LaterApprover) and approver.question is not None:
        return build_question(approver.question)
    if isinstance(reviewed, ToolResult):
        return build_answer(reviewed, None)
    on_output = CallProgress(ctx.session) if progress_token_from_params(ctx.params) is not None else None
    async with caller.leases.lease(session_id) as (session, open_id):
        result = await session.send(Request(reviewed, session.tenant, session.id), on_output)
    if result.error_code is ErrorCode.SESSION_NOT_FOUND:
        caller.leases.forget(session_id)
    return build_answer(add_used_aliases(result, find_aliases(spec, call.arguments)), open_id)


class CallProgress:
    """Sends a call's output to the client as progress. `message` is a piece of the output; `progress` is the number
    of characters so far.
    """

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._count = 0

    async def __call__(self, stream: str, text: str) -> None:
        if text:
            self._count += len(text)
            await self._session.report_progress(self._count, message=text)


async def _cancel_once(work: Awaitable[T]) -> T:
    """Return the result of `work`. A cancellation cancels `work` once, like Ctrl-C, and waits until it has cleaned
    up. The SDK would cancel each step of the cleanup again.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.move_on_after(END_S, shield=True):
            await asyncio.wait([task])
        raise


def _requested_session(ctx: Context, caller: McpCaller) -> str | None:
    """Return the session that the request names in its address or `_meta`. Raises ToolFailure(INVALID_ARGUMENTS)."""
    meta_session: Any = (ctx.meta or {}).get(SESSION_META)
    if meta_session is not None and not (isinstance(meta_session, str) and _SESSION.fullmatch(meta_session)):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f'_meta["{SESSION_META}"] is not a session name: give the id of an open session, or "new"',
        )
    if meta_session is not None and caller.session not in (None, meta_session):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f'the address names session {caller.session} and _meta["{SESSION_META}"] another session: omit one of them',
        )
    return meta_session or caller.session


async def _find(client: TenantClient, name: str) -> ToolSpec:
    """Return the tool as the caller's tenant may call it. Raises ToolFailure."""
    callable_now = {spec.name: spec for spec in await client.tools()}
    if (spec := callable_now.get(name)) is not None:
        return spec
    state = next((state for state in await client.tool_states() if state.name == name), None)
    if state is None:
        raise ToolFailure(
            ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name[:200]}", nearest=find_nearest(name[:200], callable_now)
        )
    if state.switch is not None:
        raise ToolFailure(ErrorCode.TOOL_DISABLED, state.switch.refusal(name))
    raise ToolFailure(
        ErrorCode.PERMISSION_DENIED,
        f"{name} was not run: tenant {client.tenant} may not use it; use another tool",
        was_refused=True,
    )


def _parse_call(call_id: str, params: CallToolRequestParams) -> ToolCall:
    """Return the call. Raises ToolFailure(INVALID_ARGUMENTS) for arguments that cannot be sent."""
    try:
        return ToolCall(id=call_id, name=params.name, arguments=params.arguments or {})
    except ValidationError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the call of {params.name[:128]} is invalid: {describe_invalid(error)}"
        ) from error
    except RecursionError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{params.name[:128]}: the arguments are nested too deeply: use less nesting"
        ) from error


def _build_failure(name: str, error: ToolFailure | OperatorError) -> ToolResult:
    metadata = dict(error.metadata) if isinstance(error, ToolFailure) else {}
    stand_in = ToolCall(id="none", name=name[:128] or "unknown")
    return ToolResult.failed(stand_in, error.code, str(error), metadata=metadata)
