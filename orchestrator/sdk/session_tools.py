"""The tools of a session for loops that are not ours: what a model may be told of, and calls that are reviewed before
they are made.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from contract.calls import DEFAULT_TIMEOUT_S, MAX_NAME_CHARS, ToolCall, ToolResult
from contract.errors import ErrorCode, OperatorError, ToolFailure
from contract.schema import find_aliases, find_nearest, prepare_arguments
from contract.specs import ToolSpec
from orchestrator.approvals import Approver, Verdict
from orchestrator.dispatch.call_events import OnOutput
from orchestrator.dispatch.dispatcher import note_aliases
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.sessions import Session
from orchestrator.runs.run_parts import RunParts

Names = Iterable[str] | Literal["all"]
"""Of tools: those, or every one."""


class SessionTools:
    """Made by `ToolClient.session_tools`. What a model asks for by it is judged and asked about as in a run of ours;
    nobody to ask means no.
    """

    def __init__(
        self,
        parts: RunParts,
        session: Session,
        specs: Iterable[ToolSpec],
        approver: Approver | None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._parts = parts
        self._session = session
        self._approver = approver
        self._timeout_s = timeout_s
        self._run = secrets.token_hex(8)
        self.specs = tuple(specs)
        """What a model may be told of, by name order, as it was when this was made."""
        self._specs = {spec.name: spec for spec in self.specs}

    @classmethod
    async def open(
        cls, parts: RunParts, session: Session, names: Names, approver: Approver | None, timeout_s: float
    ) -> "SessionTools":
        """Raises ToolFailure(TOOL_NOT_FOUND) for a name that the session's tenant has not, SandboxUnavailable,
        BrokerUnavailable.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        specs = await parts.specs_in(session, wanted)
        there = {spec.name for spec in specs}
        for name in wanted:
            if name != "all" and name not in there:
                known = [spec.name for spec in await parts.specs_in(session, "all")]
                told = (
                    f"there is no tool '{name}' for tenant {session.tenant}, or it is turned off; there are "
                    f"{', '.join(known)}"
                )
                raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, told, nearest=find_nearest(name, known))
        return cls(parts, session, specs, approver, timeout_s)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        approver: Approver | None = None,
        on_output: OnOutput | None = None,
    ) -> ToolResult:
        """The one result of a call that a model asks for: reviewed, then made in the session. Never raises for a call's
        failure.

        `approver`: who is asked about this call alone. Cancelled, it stops what runs in the sandbox. `on_output`: as
        for `Session.call`.
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
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, f"{name}: {where}: {first['msg']}")
        try:
            reviewed = await self._parts.review(
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
        return note_aliases(result, find_aliases(spec, call.arguments))

    async def verdict(self, name: str, arguments: Mapping[str, Any]) -> Verdict:
        """What the policy says of a call, for loops that ask people by means of their own. Raises ToolFailure for a
        call that cannot be made, OperatorError.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}")
        prepared, _ = prepare_arguments(spec, arguments)
        policy = await self._parts.policy_of(self._session.tenant)
        return policy.decide(self._session.tenant, spec, prepared)
