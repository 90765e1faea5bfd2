"""`tools/call` and `tools/list` of one caller: found, checked, approved, sent, and heard while it runs."""

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

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode, OperatorError, ToolFailure
from contract.schema import find_aliases, find_nearest
from contract.specs import NO_NETWORK, ToolSpec
from orchestrator.approvals import Approver
from orchestrator.dispatch.dispatcher import note_aliases
from orchestrator.mcp.consents import LaterApprover, Pending, build_question, choose_client_approver
from orchestrator.mcp.leases import Leases
from orchestrator.sdk.client import ToolClient

OUTPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What a model reads of the result: the same as the text content."},
        "success": {"type": "boolean"},
        "error_code": {
            "type": ["string", "null"],
            "description": "Of a call that failed: a closed code, such as TIMEOUT.",
        },
        "truncated": {"type": "boolean", "description": "Whether the text is not all of the output."},
        "spill": {
            "type": ["object", "null"],
            "description": "Where all of a truncated output lies in the session.",
            "properties": {
                "path": {"type": "string"},
                "bytes": {"type": "integer"},
                "lines": {"type": ["integer", "null"]},
            },
            "required": ["path", "bytes"],
        },
        "metadata": {
            "type": "object",
            "description": "What the tool tells beside its text; which, depends on the tool.",
        },
    },
    "required": ["text", "success", "error_code", "truncated", "spill", "metadata"],
}
"""Of every tool: the whole result as programs read it. The text is in it too, for some clients show a model the
structured content alone.
"""


def build_tool(spec: ToolSpec) -> Tool:
    """The tool as clients get it."""
    return Tool(
        name=spec.name,
        description=spec.description,
        input_schema=dict(spec.parameters),
        output_schema=OUTPUT_SCHEMA,
        annotations=build_hints(spec),
    )


def build_hints(spec: ToolSpec) -> ToolAnnotations:
    """What MCP's hints say of a tool. Of one that only reads it is left open what would be about its changes."""
    # Inside a sandbox only a command reaches what network there is.
    reaches_out = spec.pool != "sandbox" or (spec.command_parameter is not None and spec.network != NO_NETWORK)
    if spec.read_only:
        return ToolAnnotations(read_only_hint=True, open_world_hint=reaches_out)
    return ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=spec.idempotent, open_world_hint=reaches_out
    )


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


Context = ServerRequestContext[Any, Any]
T = TypeVar("T")

END_S = 10.0
"""How long a call that was cancelled may take to have its command ended."""
LIST_FRESH_MS = 2000
"""A tool that is turned off is off everywhere within so long."""
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Caller:
    """Who asks. `principal`: what an approval is bound to; `session`: what the address of the request names.
    `asks_client`: approvals are asked of whoever sits there; else of `approver`, None: of that of `client`."""

    client: ToolClient
    leases: Leases
    principal: str
    asks_client: bool
    approver: Approver | None = None
    session: str | None = None


async def list_tools(ctx: Context, caller: Caller) -> ListToolsResult:
    """What the caller's tenant may call now; in a session that is there already, with what that has of the network."""
    try:
        session = await caller.leases.attached(_wanted_session(ctx, caller))
        specs = await caller.client.tools(session=session)
    except (ToolFailure, OperatorError) as error:
        told = build_answer(_failed("tools", error), None).structured_content
        raise MCPError(INVALID_PARAMS if isinstance(error, ToolFailure) else -32000, told["text"]) from error
    tools = [build_tool(spec) for spec in sorted(specs, key=lambda spec: spec.name)]
    return ListToolsResult(tools=tools, ttl_ms=LIST_FRESH_MS, cache_scope="private")


async def call_tool(
    ctx: Context, params: CallToolRequestParams, caller: Caller
) -> CallToolResult | InputRequiredResult:
    """The call's answer, or the question that must be answered first. A failure is a result: only the model can make
    something of it.
    """
    try:
        return await _until_ended(_call(ctx, params, caller))
    except (ToolFailure, OperatorError) as error:
        return build_answer(_failed(params.name, error), None)


async def _call(ctx: Context, params: CallToolRequestParams, caller: Caller) -> CallToolResult | InputRequiredResult:
    wanted = _wanted_session(ctx, caller)
    spec = await _find(caller.client, params.name)
    pending = Pending.parse(params.request_state)
    call = _written_down(pending.call if pending is not None else secrets.token_hex(16), params)
    approver = choose_client_approver(ctx, params, pending) if caller.asks_client else caller.approver
    reviewed = await caller.client.review(call, spec, wanted, approver)
    if isinstance(approver, LaterApprover) and approver.asked is not None:
        return build_question(approver.asked)
    if isinstance(reviewed, ToolResult):
        return build_answer(reviewed, None)
    on_output = Progress(ctx.session) if progress_token_from_params(ctx.params) is not None else None
    async with caller.leases.lease(wanted) as (session, kept):
        result = await session.call(reviewed.name, reviewed.arguments, call_id=reviewed.id, on_output=on_output)
    if result.error_code is ErrorCode.SESSION_NOT_FOUND:
        caller.leases.forget(wanted)
    return build_answer(note_aliases(result, find_aliases(spec, call.arguments)), kept)


class Progress:
    """Tells a client its call's output as progress: `message` is a piece of it, `progress` how many characters there
    were.
    """

    def __init__(self, session: ServerSession) -> None:
        self._session, self._count = session, 0

    async def __call__(self, stream: str, text: str) -> None:
        if text:
            self._count += len(text)
            await self._session.report_progress(self._count, message=text)


async def _until_ended(work: Awaitable[T]) -> T:
    """What it gives. Cancelled: it is too, once, as Ctrl-C does it, and gets the time to end what it began; the SDK
    would cancel each of its steps.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.move_on_after(END_S, shield=True):
            await asyncio.wait([task])
        raise


def _wanted_session(ctx: Context, caller: Caller) -> str | None:
    """The session that the request names, by its address or its `_meta`. Raises ToolFailure(INVALID_ARGUMENTS)."""
    named: Any = (ctx.meta or {}).get(SESSION_META)
    if named is not None and not (isinstance(named, str) and _SESSION.fullmatch(named)):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f'_meta["{SESSION_META}"] is no name of a session: give the id of one that is open, or "new"',
        )
    if named is not None and caller.session not in (None, named):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f'the address names session {caller.session} and _meta["{SESSION_META}"] another: leave one out',
        )
    return named or caller.session


async def _find(client: ToolClient, name: str) -> ToolSpec:
    """The tool, as the caller's tenant may call it. Raises ToolFailure."""
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
        f"{name} was not run: it is not allowed for tenant {client.tenant}; use another tool",
        was_refused=True,
    )


def _written_down(call_id: str, params: CallToolRequestParams) -> ToolCall:
    """Raises ToolFailure(INVALID_ARGUMENTS) for arguments that cannot be sent."""
    try:
        return ToolCall(id=call_id, name=params.name, arguments=params.arguments or {})
    except (ValidationError, RecursionError) as error:
        told = (
            error.errors(include_url=False, include_input=False)[0]["msg"]
            if isinstance(error, ValidationError)
            else "nested too deep"
        )
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{params.name}: the arguments are no plain JSON: {told}"
        ) from error


def _failed(name: str, error: ToolFailure | OperatorError) -> ToolResult:
    metadata = dict(error.metadata) if isinstance(error, ToolFailure) else {}
    stand_in = ToolCall(id="none", name=name[:128] or "unknown")
    return ToolResult.failed(stand_in, error.code, str(error), metadata=metadata)
