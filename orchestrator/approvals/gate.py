"""Decisions before dispatch: a call is judged by the policy and, where it says so, asked about; nobody to ask means no.

Only calls that a model asks for are gated: what a program calls itself, by `Session.call`, is that program's own
decision.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError

from contract.approvals import Decision, canonical_json, digest_call
from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode, ToolFailure
from contract.run_events import ApprovalAsked, ApprovalDecided, OnEvent
from contract.schema import Checks, is_quick, prepare_arguments
from contract.specs import ToolSpec
from orchestrator.approvals.approvers import ApprovalRequest, Approver
from orchestrator.approvals.policies import ApprovalPolicy, Verdict
from telemetry.logs import get_logger

log = get_logger(__name__)

APPROVAL_TTL_S = 300.0
"""Seconds from the question until a yes does not count any more."""
MAX_INLINE_CHARS = 4 * 1024
"""Arguments with a command are judged beside the loop when they are longer: hostile ones take up to a second."""
DEFAULT_POLICY = ApprovalPolicy()
"""No rules: dangerous commands and tools that require permission are asked about, catastrophic commands are refused."""


@dataclass
class Approval:
    """A yes to the call with this digest, until `expires_at` (Unix seconds), once."""

    digest: str
    expires_at: float
    _is_spent: bool = field(default=False, init=False, repr=False)

    def redeem(self, digest: str, now: float) -> None:
        """Use it up for the call with `digest`. Raises ToolFailure(PERMISSION_DENIED) when it does not hold for that
        call now.
        """
        was_spent, self._is_spent = self._is_spent, True
        if was_spent:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "its approval has been used already")
        if digest != self.digest:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "its arguments are not those that were approved")
        if now > self.expires_at:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the approval came too late; ask again")


async def review(
    call: ToolCall,
    spec: ToolSpec,
    approver: Approver,
    *,
    policy: ApprovalPolicy = DEFAULT_POLICY,
    tenant: str = "default",
    session: str | None = None,
    checks: Checks = (),
    ttl_s: float = APPROVAL_TTL_S,
    clock: Callable[[], float] = time.time,
    on_event: OnEvent = lambda _: None,
    run: str = "",
) -> ToolCall | ToolResult:
    """The call to run, its arguments checked and completed and its own, or the result that says why not.

    Order: the arguments are validated (nobody is asked about an invalid call), judged by the policy, asked about;
    arguments that the approver changed are validated and judged again, and not asked about twice. `checks`: the tool's
    own. `clock`: Unix seconds. The call's own time limit starts afterwards. Never raises for what an approver does: an
    error of it, junk, or no answer within `ttl_s` seconds is no.
    """
    try:
        given = _seal(call, tenant, session)
        asked = await _prepare(call, spec, call.arguments, checks)
        verdict = await _judge(policy, tenant, spec, asked)
        if verdict.action == "deny":
            raise _denied(verdict)
        if verdict.action == "allow":
            return asked
        approval = Approval(digest_call(asked, tenant, session), clock() + ttl_s)
        shown = asked.model_copy(deep=True)
        request = ApprovalRequest(
            shown, spec, tenant, session, approval.digest, verdict.reason, verdict.warning, approval.expires_at, run
        )
        on_event(_asked(run, request))
        decision = await _ask(approver, request, ttl_s)
        on_event(_decided(run, request, decision))
        if not decision.is_allowed:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, decision.reason or "it was refused")
        # Neither what was shown nor what the caller holds may have changed meanwhile.
        is_same = _seal(call, tenant, session) == given and decision.digest in ("", approval.digest)
        approval.redeem(_seal(shown, tenant, session) if is_same else "", clock())
        if decision.arguments is None:
            return asked
        changed = await _prepare(asked, spec, decision.arguments, checks)
        return await _change(changed, spec, policy, tenant)
    except ToolFailure as failure:
        return _failed(call, failure)


async def _prepare(call: ToolCall, spec: ToolSpec, arguments: Mapping[str, Any], checks: Checks) -> ToolCall:
    """The call with prepared arguments that share nothing with those given. Raises ToolFailure(INVALID_ARGUMENTS)."""
    prepare = partial(_replace_arguments, call, spec, arguments, checks)
    return prepare() if is_quick(spec, arguments) else await asyncio.to_thread(prepare)


def _replace_arguments(call: ToolCall, spec: ToolSpec, arguments: Mapping[str, Any], checks: Checks) -> ToolCall:
    prepared, _ = prepare_arguments(spec, arguments, checks=checks)
    try:
        return ToolCall(id=call.id, name=call.name, arguments=json.loads(canonical_json(prepared)))
    except (ValueError, TypeError, RecursionError) as error:
        told = (
            error.errors(include_url=False, include_input=False)[0]["msg"]
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: the arguments are no plain JSON: {told}"
        ) from error


async def _judge(policy: ApprovalPolicy, tenant: str, spec: ToolSpec, call: ToolCall) -> Verdict:
    if spec.command_parameter is None or len(canonical_json(call.arguments)) <= MAX_INLINE_CHARS:
        return policy.decide(tenant, spec, call.arguments)
    return await asyncio.to_thread(policy.decide, tenant, spec, call.arguments)


async def _change(changed: ToolCall, spec: ToolSpec, policy: ApprovalPolicy, tenant: str) -> ToolCall:
    """The call as the approver changed it, judged once more. Raises ToolFailure."""
    verdict = await _judge(policy, tenant, spec, changed)
    if verdict.action == "deny":
        raise _denied(verdict)
    return changed


async def _ask(approver: Approver, request: ApprovalRequest, ttl_s: float) -> Decision:
    """The approver's decision; whatever is not a whole one is no."""
    try:
        async with asyncio.timeout(ttl_s) as limit:
            decision = await approver.decide(request)
    except Exception as error:  # the edge: an approver is a user's code, and whatever it raises means no
        if isinstance(error, TimeoutError) and limit.expired():
            log.warning("approval_unanswered", tool=request.call.name, call=request.call.id, after_s=ttl_s)
            return Decision(False, f"nobody answered within {ttl_s:g} s")
        log.exception("approver_failed", tool=request.call.name, call=request.call.id)
        return Decision(False, "it needs approval and asking for it failed")
    if not _is_whole(decision):
        log.error("approver_answered_junk", tool=request.call.name, call=request.call.id, kind=type(decision).__name__)
        return Decision(False, "it needs approval and the answer could not be read")
    log.info(
        "approval_decided",
        tool=request.call.name,
        call=request.call.id,
        digest=request.digest,
        allowed=decision.is_allowed,
    )
    return decision


def _asked(run: str, request: ApprovalRequest) -> ApprovalAsked:
    return ApprovalAsked(
        run=run,
        call=request.call.model_copy(deep=True),
        digest=request.digest,
        reason=request.reason,
        warning=request.warning,
        expires_at=request.expires_at,
    )


def _decided(run: str, request: ApprovalRequest, decision: Decision) -> ApprovalDecided:
    return ApprovalDecided(
        run=run,
        call_id=request.call.id,
        digest=request.digest,
        is_allowed=decision.is_allowed,
        reason=decision.reason,
        is_changed=decision.is_allowed and decision.arguments is not None,
    )


def _is_whole(decision: Any) -> bool:
    return (
        isinstance(decision, Decision)
        and isinstance(decision.is_allowed, bool)
        and isinstance(decision.reason, str)
        and isinstance(decision.digest, str)
        and (decision.arguments is None or isinstance(decision.arguments, Mapping))
    )


def _seal(call: ToolCall, tenant: str, session: str | None) -> str:
    """The digest of a call that others may change, "" when its arguments are no plain JSON."""
    try:
        return digest_call(call, tenant, session)
    except (ValueError, TypeError, RecursionError):
        return ""


def _denied(verdict: Verdict) -> ToolFailure:
    return ToolFailure(verdict.code or ErrorCode.PERMISSION_DENIED, verdict.reason)


def _failed(call: ToolCall, failure: ToolFailure) -> ToolResult:
    is_invalid = failure.code is ErrorCode.INVALID_ARGUMENTS
    sentence = failure.message if is_invalid else f"{call.name} was not run: {failure.message}"
    told = {} if is_invalid else {"was_refused": True}
    return ToolResult.failed(call, failure.code, sentence, metadata={**failure.metadata, **told})
