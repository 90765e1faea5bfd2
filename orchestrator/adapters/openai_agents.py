"""Tools of a session as FunctionTools of the OpenAI Agents SDK. The schemas are unchanged and failures are text.
An approver of toolcrew or the SDK's own approvals decide about calls.
"""

import copy
from typing import Any

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.extras import explain_missing
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.adapters.artifacts import build_artifact
from toolcrew.orchestrator.approvals import ApprovalRequest, Approver, Decision
from toolcrew.orchestrator.dialects.native_assembler import parse_arguments
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sdk.session_tools import Names, SessionTools
from toolcrew.orchestrator.sessions.session import Session

try:
    from agents import FunctionTool, FunctionToolCustomDataContext, RunContextWrapper, UserError
    from agents.strict_schema import ensure_strict_json_schema
    from agents.tool_context import ToolContext
    from agents.tracing import SpanError, get_current_span
except ModuleNotFoundError as error:
    raise explain_missing(error) from error


class PoolOutput(str):
    """Text of a tool's result for the model. `artifact` has the rest of the result. The SDK's hooks receive the whole
    object, and the SDK stores `artifact` in the `custom_data` of the tool's output item.
    """

    artifact: dict[str, Any]

    @classmethod
    def of(cls, result: ToolResult) -> "PoolOutput":
        output = cls(result.text())
        output.artifact = build_artifact(result)
        return output


class RunApprover:
    """Approver that takes the decision about a call from the SDK's run (`RunState.approve` and `reject`). A call
    without an approval is refused.
    """

    def __init__(self, context: ToolContext[Any]) -> None:
        self._context = context

    async def decide(self, request: ApprovalRequest) -> Decision:
        is_approved = self._context.is_tool_approved(self._context.tool_name, self._context.tool_call_id)
        return Decision(
            is_approved is True, "" if is_approved else "the call needs approval and the run has no decision for it"
        )


class AgentCalls:
    """Functions with which the SDK calls one tool."""

    def __init__(self, spec: ToolSpec, tools: SessionTools, asks_by_run: bool) -> None:
        self._spec = spec
        self._tools = tools
        self._asks_by_run = asks_by_run

    async def invoke(self, context: ToolContext[Any], raw: str) -> PoolOutput:
        """Run a call. `raw`: the arguments as the model wrote them. A failed call never raises an exception; the
        model reads the failure.
        """
        try:
            arguments = parse_arguments(raw)
        except ValueError as error:
            call = ToolCall(id="unsent", name=self._spec.name)
            result = ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, f"{self._spec.name}: {error}")
        else:
            approver = RunApprover(context) if self._asks_by_run else None
            result = await self._tools.call(self._spec.name, arguments, approver=approver)
        if not result.success:
            mark_span_failed(result)
        return PoolOutput.of(result)

    async def needs_approval(self, context: RunContextWrapper[Any], arguments: dict[str, Any], call_id: str) -> bool:
        """Return whether a person must decide before the call runs. False for a call that is refused in any case, so
        that no person is asked.
        """
        try:
            return (await self._tools.decide(self._spec.name, arguments)).action == "ask"
        except (ToolFailure, OperatorError):
            # Ask no person about a call that cannot run. It is checked again when it runs, and its result then contains
            # the error.
            return False


def mark_span_failed(result: ToolResult) -> None:
    """Mark the SDK's span of the call as failed, with the error code. The trace must not contain the output."""
    span = get_current_span()
    if span is not None:
        span.set_error(
            SpanError(message="Error running tool", data={"tool_name": result.name, "code": str(result.error_code)})
        )


async def as_agents_tools(
    client: ToolClient,
    session: Session,
    names: Names = "all",
    *,
    approver: Approver | None = None,
    asks_by_run: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[FunctionTool]:
    """Return the tools of `session` for an Agent of the SDK. The tools work while the session is open, in the event
    loop of `client`.

    `approver`: decides on calls that need approval; None: the client's approver. `asks_by_run`: the run is interrupted
    instead, and continues after RunState.approve or reject. `timeout_s`: the limit of calls whose tool has no limit of
    its own. Raises ConfigError for both kinds of approval, ToolFailure(TOOL_NOT_FOUND) for an unknown name,
    SandboxUnavailable, BrokerUnavailable.
    """
    if asks_by_run and approver is not None:
        raise ConfigError("approver and asks_by_run=True are both set: remove one of them")
    tools = await client.session_tools(session, names, approver=approver, timeout_s=timeout_s)
    return [_build_tool(spec, AgentCalls(spec, tools, asks_by_run), asks_by_run) for spec in tools.specs]


def _build_tool(spec: ToolSpec, calls: AgentCalls, asks_by_run: bool) -> FunctionTool:
    parameters: dict[str, Any] = copy.deepcopy(spec.parameters)
    return FunctionTool(
        name=spec.name,
        description=spec.description,
        params_json_schema=parameters,
        on_invoke_tool=calls.invoke,
        strict_json_schema=is_strict(parameters),
        needs_approval=calls.needs_approval if asks_by_run else False,
        custom_data_extractor=_custom_data,
    )


def is_strict(parameters: dict[str, Any]) -> bool:
    """Return whether a schema already fulfils the SDK's strict mode. The SDK's own conversion would make optional
    parameters required.
    """
    try:
        return ensure_strict_json_schema(copy.deepcopy(parameters)) == parameters
    except UserError:
        return False


def _custom_data(context: FunctionToolCustomDataContext) -> dict[str, Any] | None:
    return context.output.artifact if isinstance(context.output, PoolOutput) else None
