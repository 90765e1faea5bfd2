"""The approval gate: before a call is sent, the approval policy judges the call, and may require that an approver
decides.

Without an approver that can answer, the call is refused. The gate applies only to calls that a model requests. A call
that a program makes with `Session.call` is that program's own decision.

Invariant: an approval allows only the call that the approver saw, once, before the approval expires. A digest binds
each approval to the call, its arguments, its tenant and its session.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.approvals import Decision, canonical_json, digest_call
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.run_events import ApprovalAsked, ApprovalDecided, OnEvent
from toolcrew.contract.schema import Checks, is_quick, prepare_arguments
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest, Approver
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, PolicyDecision
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

APPROVAL_TTL_S = 300.0
"""Lifetime of an approval in seconds, from the moment of the question."""
MAX_INLINE_CHARS = 4 * 1024
"""Limit, in characters, of arguments with a command that are judged on the event loop.

Longer arguments are judged in a thread, because hostile commands take up to a second to parse.
"""
DEFAULT_POLICY = ApprovalPolicy()
"""Policy for deployments without rules of their own. It asks about dangerous commands and tools that require
permission, and refuses catastrophic commands.
"""


@dataclass
class Approval:
    """Single-use approval of the call with this digest, valid until `expires_at` (Unix seconds)."""

    digest: str
    expires_at: float
    _is_spent: bool = field(default=False, init=False, repr=False)

    def redeem(self, digest: str, now: float) -> None:
        """Use the approval for the call with `digest`.

        Raises ToolFailure(PERMISSION_DENIED) when the approval is used, expired, or belongs to another call.
        """
        # The approval is spent before any check, so that a failed attempt uses the approval up too.
        was_spent, self._is_spent = self._is_spent, True
        if was_spent:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the approval was already used: request another one")
        if digest != self.digest:
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED, "the arguments differ from the approved ones: request another approval"
            )
        if now > self.expires_at:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the approval came too late: request another one")


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
    """Return the call to run, as a copy with validated arguments, or the result that explains the refusal.

    The order is: validate the arguments, apply the policy, ask the approver. No person is asked about an invalid call.
    Arguments that the approver changed are validated and judged again. The approver is not asked a second time.

    `checks`: the argument checks of the tool. `clock`: Unix seconds. The time limit of the call starts after the
    decision. An approver that raises, returns an invalid decision, or does not answer within `ttl_s` seconds refuses
    the call. None of these cases raises an exception.
    """
    try:
        digest = _seal(call, tenant, session)
        prepared = await _prepare(tenant, call, spec, call.arguments, checks)
        policy_decision = await _judge(policy, tenant, spec, prepared)
        if policy_decision.action == "deny":
            raise _build_denial(policy_decision)
        if policy_decision.action == "allow":
            return prepared
        approval = Approval(digest_call(prepared, tenant, session), clock() + ttl_s)
        # The approver receives a copy. Approver code must not be able to change the call that runs.
        shown = prepared.model_copy(deep=True)
        request = ApprovalRequest(
            shown,
            spec,
            tenant,
            session,
            approval.digest,
            policy_decision.reason,
            policy_decision.warning,
            approval.expires_at,
            run,
        )
        on_event(_build_asked_event(run, request))
        decision = await _ask(approver, request, ttl_s)
        on_event(_build_decided_event(run, request, decision))
        if not decision.is_allowed:
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, decision.reason or "the call was denied")
        # The approver or the caller may have changed its copy of the call during the question. Either change makes the
        # approval invalid, because the person decided about different arguments.
        is_same = _seal(call, tenant, session) == digest and decision.digest in ("", approval.digest)
        approval.redeem(_seal(shown, tenant, session) if is_same else "", clock())
        if decision.arguments is None:
            return prepared
        changed = await _prepare(tenant, prepared, spec, decision.arguments, checks)
        return await _change(changed, spec, policy, tenant)
    except ToolFailure as failure:
        return _build_failure(call, failure)


async def _prepare(
    tenant: str, call: ToolCall, spec: ToolSpec, arguments: Mapping[str, Any], checks: Checks
) -> ToolCall:
    """Return a copy of the call with prepared arguments that share no objects with the given arguments.

    Raises ToolFailure(INVALID_ARGUMENTS).
    """
    prepare = partial(_replace_arguments, call, spec, arguments, checks)
    return prepare() if is_quick(spec, arguments) else await in_tenant_thread(tenant, prepare)


def _replace_arguments(call: ToolCall, spec: ToolSpec, arguments: Mapping[str, Any], checks: Checks) -> ToolCall:
    prepared, _ = prepare_arguments(spec, arguments, checks=checks)
    try:
        return ToolCall(id=call.id, name=call.name, arguments=json.loads(canonical_json(prepared)))
    except (ValueError, TypeError, RecursionError) as error:
        reason = describe_invalid(error) if isinstance(error, ValueError) else str(error)
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{spec.name}: the arguments are not plain JSON: {reason}"
        ) from error


async def _judge(policy: ApprovalPolicy, tenant: str, spec: ToolSpec, call: ToolCall) -> PolicyDecision:
    if spec.command_parameter is None or len(canonical_json(call.arguments)) <= MAX_INLINE_CHARS:
        return policy.decide(tenant, spec, call.arguments)
    return await in_tenant_thread(tenant, policy.decide, tenant, spec, call.arguments)


async def _change(changed: ToolCall, spec: ToolSpec, policy: ApprovalPolicy, tenant: str) -> ToolCall:
    """Return the changed call unless the policy denies it. Raises ToolFailure."""
    policy_decision = await _judge(policy, tenant, spec, changed)
    if policy_decision.action == "deny":
        raise _build_denial(policy_decision)
    return changed


async def _ask(approver: Approver, request: ApprovalRequest, ttl_s: float) -> Decision:
    """Return the decision of the approver. An error, a timeout or an invalid decision counts as a refusal."""
    try:
        async with asyncio.timeout(ttl_s) as limit:
            decision = await approver.decide(request)
    except Exception as error:  # the edge: an approver is a user's code, and any error of an approver means no
        if isinstance(error, TimeoutError) and limit.expired():
            log.warning("approval_unanswered", tool=request.call.name, call=request.call.id, after_s=ttl_s)
            return Decision(False, f"no approver answered within {ttl_s:g} s")
        log.exception("approver_failed", tool=request.call.name, call=request.call.id)
        return Decision(False, "the call needs approval, and the question could not be asked")
    if not _is_whole(decision):
        log.error("approver_answer_invalid", tool=request.call.name, call=request.call.id, kind=type(decision).__name__)
        return Decision(False, "the call needs approval, and the answer could not be read")
    log.info(
        "approval_decided",
        tool=request.call.name,
        call=request.call.id,
        digest=request.digest,
        allowed=decision.is_allowed,
    )
    return decision


def _build_asked_event(run: str, request: ApprovalRequest) -> ApprovalAsked:
    return ApprovalAsked(
        run=run,
        call=request.call.model_copy(deep=True),
        digest=request.digest,
        reason=request.reason,
        warning=request.warning,
        expires_at=request.expires_at,
    )


def _build_decided_event(run: str, request: ApprovalRequest, decision: Decision) -> ApprovalDecided:
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
    """Return the current digest of a call, or "" when its arguments are not plain JSON.

    The digest is computed again, because other code has the same call object and may have changed it.
    """
    try:
        return digest_call(call, tenant, session)
    except (ValueError, TypeError, RecursionError):
        return ""


def _build_denial(policy_decision: PolicyDecision) -> ToolFailure:
    return ToolFailure(policy_decision.code or ErrorCode.PERMISSION_DENIED, policy_decision.reason)


def _build_failure(call: ToolCall, failure: ToolFailure) -> ToolResult:
    is_invalid = failure.code is ErrorCode.INVALID_ARGUMENTS
    sentence = failure.message if is_invalid else f"{call.name} was not run: {failure.message}"
    fields = {} if is_invalid else {"was_refused": True}
    return ToolResult.failed(call, failure.code, sentence, metadata={**failure.metadata, **fields})
