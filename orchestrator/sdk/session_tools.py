"""Tools of a session for the loops of other frameworks: descriptions for a model, and calls that are reviewed before
they run.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from toolcrew.contract.calls import DEFAULT_TIMEOUT_S, MAX_NAME_CHARS, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.schema import find_aliases, find_nearest, prepare_arguments
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals import Approver, PolicyDecision
from toolcrew.orchestrator.dispatch.call_event_listener import OnOutput
from toolcrew.orchestrator.dispatch.dispatcher import add_used_aliases
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.sessions.session import Session

Names = Iterable[str] | Literal["all"]
"""Names of the tools to offer, or "all"."""


class SessionTools:
    """Tools of one session, created by `ToolClient.session_tools`. Policies and approvals apply as in a run of this
    project's own loop. Without an approver, a call that needs approval is refused.
    """

    def __init__(
        self,
        builder: AgentBuilder,
        session: Session,
        specs: Iterable[ToolSpec],
        approver: Approver | None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._builder = builder
        self._session = session
        self._approver = approver
        self._timeout_s = timeout_s
        self._run = secrets.token_hex(8)
        self.specs = tuple(specs)
        """Specifications of the tools for a model, by name, at the time of creation."""
        self._specs = {spec.name: spec for spec in self.specs}

    @classmethod
    async def open(
        cls, builder: AgentBuilder, session: Session, names: Names, approver: Approver | None, timeout_s: float
    ) -> "SessionTools":
        """Create the tools of these names. Raises ToolFailure(TOOL_NOT_FOUND) for a tool that the session's tenant
        does not have, SandboxUnavailable, BrokerUnavailable.
        """
        requested = [names] if isinstance(names, str) else list(names)
        specs = await builder.specs_in(session, requested)
        available_names = {spec.name for spec in specs}
        for name in requested:
            if name != "all" and name not in available_names:
                available = [spec.name for spec in await builder.specs_in(session, "all")]
                message = (
                    f"tenant {session.tenant} has no tool '{name}', or the tool is disabled. Available tools: "
                    f"{', '.join(available)}"
                )
                raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, message, nearest=find_nearest(name, available))
        return cls(builder, session, specs, approver, timeout_s)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        approver: Approver | None = None,
        on_output: OnOutput | None = None,
    ) -> ToolResult:
        """Return the one result of a call that a model requests. The call is reviewed and then runs in the session. A
        failed call never raises an exception.

        `approver`: the approver of this call only. A cancellation stops the processes in the sandbox. `on_output` works
        as in `Session.call`.
        """
        call = ToolCall(id=secrets.token_hex(16), name=name[:MAX_NAME_CHARS] or "unknown")
        spec = self._specs.get(name)
        if spec is None:
            nearest = find_nearest(name, self._specs)
            return ToolResult.failed(
                call, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name[:200]}", metadata={"nearest": nearest}
            )
        try:
            call = ToolCall(id=call.id, name=name, arguments=dict(arguments))
        except ValidationError as error:
            return ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, f"{name}: {describe_invalid(error)}")
        try:
            reviewed = await self._builder.reviewer.review(
                call, spec, self._session.tenant, self._session.id, run=self._run, approver=approver or self._approver
            )
        except (ToolFailure, OperatorError) as error:
            return ToolResult.failed(call, error.code, str(error))
        if isinstance(reviewed, ToolResult):
            return reviewed
        request = Request(
            reviewed, self._session.tenant, self._session.id, default_timeout_s=self._timeout_s, run=self._run
        )
        result = await self._session.send(request, on_output)
        return add_used_aliases(result, find_aliases(spec, call.arguments))

    async def decide(self, name: str, arguments: Mapping[str, Any]) -> PolicyDecision:
        """Return the decision of the policy for a call, for loops with their own approvals. Raises ToolFailure for an
        invalid call, OperatorError.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}")
        prepared, _ = prepare_arguments(spec, arguments)
        policy = await self._builder.reviewer.policy_of(self._session.tenant)
        return policy.decide(self._session.tenant, spec, prepared)
