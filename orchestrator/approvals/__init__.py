"""Approval of calls before dispatch: which calls run without a question, need a decision, or are refused."""

from toolcrew.contract.approvals import Decision, digest_call
from toolcrew.orchestrator.approvals.approvers import (
    ApprovalRequest,
    Approver,
    AutoApprover,
    CallbackApprover,
    ConsoleApprover,
    RefusingApprover,
    choose_approver,
)
from toolcrew.orchestrator.approvals.gate import APPROVAL_TTL_S, DEFAULT_POLICY, Approval, review
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, PolicyDecision, Rule, load_policy

__all__ = [
    "APPROVAL_TTL_S",
    "DEFAULT_POLICY",
    "Approval",
    "ApprovalPolicy",
    "ApprovalRequest",
    "Approver",
    "AutoApprover",
    "CallbackApprover",
    "ConsoleApprover",
    "Decision",
    "PolicyDecision",
    "RefusingApprover",
    "Rule",
    "choose_approver",
    "digest_call",
    "load_policy",
    "review",
]
