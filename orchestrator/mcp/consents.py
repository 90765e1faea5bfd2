"""Approval by whoever sits at the client: asked by an elicitation, in the round trip that the client's revision has for
it.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp_types import CallToolRequestParams, ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from orchestrator.approvals import ApprovalRequest, Approver, Decision, RefusingApprover
from orchestrator.approvals.approvers import describe_request

QUESTION = "approval"
_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "allow": {
            "type": "boolean",
            "title": "Run it",
            "description": "Yes runs exactly this call, once.",
            "default": False,
        }
    },
    "required": ["allow"],
}
_NOBODY = (
    "it needs approval and this client cannot ask for one: use a client that offers elicitation, have whoever runs "
    "`toolcrew serve mcp` set TOOLCREW_APPROVALS=queue (people then decide: `toolcrew approvals list`), or have the "
    "call allowed by a rule of TOOLCREW_APPROVAL_POLICY"
)
Ask = Callable[[ApprovalRequest], Awaitable[ElicitResult]]


@dataclass(frozen=True)
class Pending:
    """What the client carries back with its answer, sealed: the call that was asked about. Its id never runs twice, so
    that one yes is one run.
    """

    call: str
    digest: str

    def dump(self) -> str:
        return json.dumps([self.call, self.digest])

    @classmethod
    def parse(cls, text: str | None) -> "Pending | None":
        """Of a state whose seal was right, so that it is one of ours."""
        return cls(*json.loads(text)) if text is not None else None


class LaterApprover:
    """Takes note of what is to be asked; the call is then made again, with the answer."""

    def __init__(self) -> None:
        self.asked: ApprovalRequest | None = None

    async def decide(self, request: ApprovalRequest) -> Decision:
        self.asked = request
        return Decision(False, "it waits for an approval")


class AnsweredApprover:
    """Gives the answer that the client brought to what it was asked about."""

    def __init__(self, answer: object, digest: str) -> None:
        self._answer, self._digest = answer, digest

    async def decide(self, request: ApprovalRequest) -> Decision:
        return _decision(self._answer, self._digest)


class AskingApprover:
    """Asks while the call waits: in revisions where a server may send requests."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def decide(self, request: ApprovalRequest) -> Decision:
        return _decision(await self._ask(request), request.digest)


def choose_client_approver(
    ctx: ServerRequestContext[Any, Any], params: CallToolRequestParams, pending: Pending | None
) -> Approver:
    """Who decides on a call, when it is the client's to ask."""
    if pending is not None:
        return AnsweredApprover((params.input_responses or {}).get(QUESTION), pending.digest)
    if not _may_elicit(ctx):
        return RefusingApprover(_NOBODY)
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return LaterApprover()
    if not ctx.session.can_send_request:
        return RefusingApprover(_NOBODY)

    async def ask(request: ApprovalRequest) -> ElicitResult:
        return await ctx.session.elicit_form(describe_request(request), _FORM, ctx.request_id)

    return AskingApprover(ask)


def build_question(request: ApprovalRequest) -> InputRequiredResult:
    """The answer to a call that must be asked about first."""
    form = ElicitRequestFormParams(message=describe_request(request), requested_schema=_FORM)
    state = Pending(request.call.id, request.digest)
    return InputRequiredResult(input_requests={QUESTION: ElicitRequest(params=form)}, request_state=state.dump())


def _may_elicit(ctx: ServerRequestContext[Any, Any]) -> bool:
    told = ctx.session.client_capabilities
    offered = told.elicitation if told is not None else None
    # Before there were two modes, to offer it at all meant forms.
    return offered is not None and (offered.form is not None or offered.url is None)


def _decision(answer: object, digest: str) -> Decision:
    """Only a plain yes is one."""
    if not isinstance(answer, ElicitResult) or answer.action == "cancel":
        return Decision(False, "nobody answered whether it may run", digest=digest)
    content: Mapping[str, Any] = answer.content or {}
    if answer.action != "accept" or content.get("allow") is not True:
        return Decision(False, "it was refused", digest=digest)
    return Decision(True, digest=digest)
