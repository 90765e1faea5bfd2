"""Approvals over HTTP: the calls that wait for a decision, and the decisions."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.access_views import Page
from toolcrew.contract.approvals import Decision
from toolcrew.contract.clock import Instant
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.api.access import AnyCaller, Caller
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, page_from
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.operations.views import ApprovalView, view_approval
from toolcrew.store.approvals import (
    AlreadyAnswered,
    ApprovalAnswer,
    ApprovalQueue,
    OtherCall,
    QuestionOver,
    UnknownQuestion,
)
from toolcrew.store.audit import Actor

router = APIRouter(prefix="/v1/approvals", tags=["approvals"], responses=responses())

ApprovalId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class NewAnswer(BaseModel):
    """A decision about a call.

    `decision`: `allow` runs the call unchanged; `modify` runs the call with `arguments`, which are validated again;
    `reject` does not run the call, and the model reads `reason`. `digest`: the digest that the list of approvals showed
    for the call.
    """

    model_config = ConfigDict(extra="forbid")

    decision: Literal["allow", "modify", "reject"]
    digest: str = Field(min_length=1, max_length=128)
    reason: str = Field(default="", max_length=1024)
    arguments: dict[str, Any] | None = None


class AnswerView(BaseModel):
    """A stored decision, with the person who decided and the time."""

    id: str
    tenant: str
    tool: str
    is_allowed: bool
    reason: str
    arguments: dict[str, Any] | None
    by: Actor
    at: Instant


@router.get("")
async def list_approvals(
    caller: AnyCaller,
    cursor: Cursor = None,
    limit: Limit = 50,
    everybody: Annotated[bool, Query(description="Include all tenants, for operators' keys.")] = False,
) -> Page[ApprovalView]:
    """List the calls that wait for a decision. The call that expires first is first."""
    if everybody and not caller.is_operator:
        raise ToolFailure(ErrorCode.PERMISSION_DENIED, "only operators may use `everybody`: omit it")
    actor, tenant = caller.identity.actor(), None if everybody else caller.tenant
    page = await _queue(caller).pending(actor, tenant, decode_cursor(cursor), limit)
    return page_from(map(view_approval, page.questions), page.cursor)


@router.get("/{approval_id}", responses=responses(404, 409))
async def get_approval(approval_id: ApprovalId, caller: AnyCaller) -> ApprovalView:
    """Return one call that waits for a decision."""
    try:
        return view_approval(await _queue(caller).get(approval_id, caller.identity.actor()))
    except ToolFailure as failure:
        raise _build_problem(failure) from failure


@router.post("/{approval_id}", responses=responses(404, 409))
async def answer_approval(approval_id: ApprovalId, body: NewAnswer, caller: AnyCaller) -> AnswerView:
    """Decide about a call, once. The call continues within a moment. The audit log contains the decision."""
    if (body.decision == "modify") != (body.arguments is not None):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, "only the decision `modify` takes `arguments`: omit them, or send `modify`"
        )
    decision = Decision(body.decision != "reject", body.reason, body.arguments)
    try:
        answer = await _queue(caller).decide(approval_id, decision, digest=body.digest, actor=caller.identity.actor())
    except ToolFailure as failure:
        raise _build_problem(failure) from failure
    return _answer_view(answer)


def _queue(caller: Caller) -> ApprovalQueue:
    return caller.app_state.parts.approvals


def _build_problem(failure: ToolFailure) -> Exception:
    """Return an error of the approvals as a response with the right HTTP status."""
    match failure:
        case UnknownQuestion():
            return ApiProblem(
                ApiCode.NOT_FOUND, "no call with this id waits for approval: GET /v1/approvals lists the waiting calls"
            )
        case AlreadyAnswered() | QuestionOver() | OtherCall():
            return ApiProblem(ApiCode.CONFLICT, failure.message)
        case _:
            return failure


def _answer_view(answer: ApprovalAnswer) -> AnswerView:
    return AnswerView.model_validate(answer.model_dump(include=set(AnswerView.model_fields)))
