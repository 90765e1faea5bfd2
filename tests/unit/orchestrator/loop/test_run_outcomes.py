"""The cause of an item's failure: failures that a retry can fix, and failures that it cannot fix."""

import pytest

from tests.support.records.builders import build_call
from toolcrew.contract.calls import Clocks, SandboxInfo, ToolResult
from toolcrew.contract.errors import (
    BrokerUnavailable,
    ConfigError,
    ContextWindowExceeded,
    ErrorCode,
    ModelInterrupted,
    ModelRefused,
    ModelUnavailable,
    OperatorError,
    SandboxUnavailable,
    ToolFailure,
)
from toolcrew.contract.run_events import FailureKind
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.loop.agent import RunResult
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.loop.transcript import Transcript
from toolcrew.orchestrator.runs.outcomes import judge_call, judge_error, judge_run

ERRORS: list[tuple[Exception, FailureKind]] = [
    (ContextWindowExceeded("x"), FailureKind.MODEL),
    (ModelRefused("x"), FailureKind.MODEL),
    (ModelUnavailable("x"), FailureKind.INFRASTRUCTURE),
    (ModelInterrupted("x"), FailureKind.INFRASTRUCTURE),
    (BrokerUnavailable("x"), FailureKind.INFRASTRUCTURE),
    (SandboxUnavailable("x"), FailureKind.INFRASTRUCTURE),
    (OperatorError("x"), FailureKind.INFRASTRUCTURE),
    (ConfigError("x"), FailureKind.INPUT),
    (ToolFailure(ErrorCode.PERMISSION_DENIED, "x"), FailureKind.INPUT),
    (ToolFailure(ErrorCode.UNKNOWN_TENANT, "x"), FailureKind.INPUT),
    (ToolFailure(ErrorCode.FILE_NOT_FOUND, "x"), FailureKind.INPUT),
    (ToolFailure(ErrorCode.QUOTA_EXCEEDED, "x"), FailureKind.INFRASTRUCTURE),
    (ToolFailure(ErrorCode.SESSION_NOT_FOUND, "x"), FailureKind.INFRASTRUCTURE),
    (KeyError("x"), FailureKind.INFRASTRUCTURE),
]


@pytest.mark.parametrize(("error", "kind"), ERRORS, ids=lambda value: repr(value)[:60])
def test_error_is_judged_with_its_failure_kind(error: Exception, kind: FailureKind) -> None:
    failure = judge_error(error)
    assert (failure.kind, "x" in failure.message) == (kind, True)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_failed_call_is_a_tool_or_infrastructure_failure(code: ErrorCode) -> None:
    failure = judge_call(ToolResult.failed(build_call(), code, "no"))
    assert failure is not None
    infrastructure_codes = {
        "SANDBOX_UNAVAILABLE",
        "BROKER_UNAVAILABLE",
        "BROKER_FULL",
        "HOST_LOST",
        "OUTCOME_UNKNOWN",
        "ENVELOPE_REFUSED",
        "CONFIG_MISSING",
        "INTERNAL",
    }
    busy_codes = {"RATE_LIMITED", "QUOTA_EXCEEDED", "BUDGET_EXCEEDED", "SESSION_NOT_FOUND", "SESSION_BUSY", "TIMEOUT"}
    assert (failure.kind is FailureKind.INFRASTRUCTURE) == (code.value in infrastructure_codes | busy_codes)
    assert (failure.code, failure.message) == (code.value, "no")


def test_a_call_during_which_its_sandbox_died_gets_no_other_attempt() -> None:
    result = ToolResult.failed(
        build_call(), ErrorCode.SANDBOX_UNAVAILABLE, "the sandbox died", sandbox=SandboxInfo(id="c0ffee")
    )
    failure = judge_call(result)
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.TOOL, "SANDBOX_UNAVAILABLE")


@pytest.mark.parametrize("reason", list(StopReason))
def test_only_an_answered_run_is_a_success(reason: StopReason) -> None:
    failure = judge_run(RunResult("", reason, 1, Transcript({"role": "system", "content": ""}), TokenUsage(), Clocks()))
    if reason is StopReason.ANSWERED:
        assert failure is None
    else:
        assert failure is not None
        # A budget is not the model's fault: the item may succeed after the reset.
        is_budget = reason is StopReason.BUDGET_EXCEEDED
        kind, code = (FailureKind.INFRASTRUCTURE, "BUDGET_EXCEEDED") if is_budget else (FailureKind.MODEL, reason.value)
        assert (failure.kind, failure.code, bool(failure.message)) == (kind, code, True)
