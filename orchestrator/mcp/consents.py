"""Approval of calls by the person at the MCP client. The server asks with an MCP elicitation (a question to the user),
in the form that the client's version of MCP supports.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp_types import CallToolRequestParams, ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from toolcrew.orchestrator.approvals import ApprovalRequest, Approver, Decision, RefusingApprover
from toolcrew.orchestrator.approvals.approvers import describe_request

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
_CANNOT_ASK = (
    "the call needs approval and this client cannot ask for one: use a client that supports elicitation, set "
    "TOOLCREW_APPROVALS=queue for `toolcrew serve mcp` (people then decide: `toolcrew approvals list`), or allow the "
    "call with a rule of TOOLCREW_APPROVAL_POLICY"
)
Ask = Callable[[ApprovalRequest], Awaitable[ElicitResult]]


@dataclass(frozen=True)
class PendingApproval:
    """Encrypted record of the call that a question is about. The client receives it with the question and returns it
    with the answer. A call id never runs twice, so one approval allows one run.
    """

    call: str
    digest: str

    def dump(self) -> str:
        return json.dumps([self.call, self.digest])

    @classmethod
    def parse(cls, text: str | None) -> "PendingApproval | None":
        """Parse a record that was already decrypted and verified, so that this deployment must have written it."""
        return cls(*json.loads(text)) if text is not None else None


class LaterApprover:
    """Approver that records the question about a call and refuses the call for now. The client asks its person, and
    sends the call again with the answer.
    """

    def __init__(self) -> None:
        self.question: ApprovalRequest | None = None

    async def decide(self, request: ApprovalRequest) -> Decision:
        self.question = request
        return Decision(False, "the call waits for an approval")


class AnsweredApprover:
    """Approver that decides with the answer that the client sent with its call."""

    def __init__(self, answer: object, digest: str) -> None:
        self._answer = answer
        self._digest = digest

    async def decide(self, request: ApprovalRequest) -> Decision:
        return _decision(self._answer, self._digest)


class AskingApprover:
    """Approver that asks the client while the call waits. For versions of MCP in which a server may send requests."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def decide(self, request: ApprovalRequest) -> Decision:
        return _decision(await self._ask(request), request.digest)


def choose_client_approver(
    ctx: ServerRequestContext[Any, Any], params: CallToolRequestParams, pending: PendingApproval | None
) -> Approver:
    """Return the approver for a call whose client decides on approvals."""
    if pending is not None:
        return AnsweredApprover((params.input_responses or {}).get(QUESTION), pending.digest)
    if not _may_elicit(ctx):
        return RefusingApprover(_CANNOT_ASK)
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return LaterApprover()
    if not ctx.session.can_send_request:
        return RefusingApprover(_CANNOT_ASK)

    async def ask(request: ApprovalRequest) -> ElicitResult:
        return await ctx.session.elicit_form(describe_request(request), _FORM, ctx.request_id)

    return AskingApprover(ask)


def build_question(request: ApprovalRequest) -> InputRequiredResult:
    """Return the question that a person must answer before the call can run."""
    form = ElicitRequestFormParams(message=describe_request(request), requested_schema=_FORM)
    state = PendingApproval(request.call.id, request.digest)
    return InputRequiredResult(input_requests={QUESTION: ElicitRequest(params=form)}, request_state=state.dump())


def _may_elicit(ctx: ServerRequestContext[Any, Any]) -> bool:
    capabilities = ctx.session.client_capabilities
    offered = capabilities.elicitation if capabilities is not None else None
    # In versions of MCP before there were two kinds of elicitation, every client with elicitation supported forms.
    return offered is not None and (offered.form is not None or offered.url is None)


def _decision(answer: object, digest: str) -> Decision:
    """Return the decision in an answer. Only an explicit yes allows the call."""
    if not isinstance(answer, ElicitResult) or answer.action == "cancel":
        return Decision(False, "the client did not answer the approval question", digest=digest)
    content: Mapping[str, Any] = answer.content or {}
    if answer.action != "accept" or content.get("allow") is not True:
        return Decision(False, "the call was denied", digest=digest)
    return Decision(True, digest=digest)
