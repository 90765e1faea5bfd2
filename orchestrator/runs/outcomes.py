"""Classifies the end of an item, so that a client knows whether a retry helps."""

from collections.abc import Mapping
from typing import Any

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import (
    OPERATOR_CODES,
    BrokerUnavailable,
    ConfigError,
    ContextWindowExceeded,
    ErrorCode,
    ModelDenied,
    ModelRefused,
    ModelUnavailable,
    OperatorError,
    ToolFailure,
)
from toolcrew.contract.run_events import Failure, FailureKind
from toolcrew.orchestrator.loop.agent import RunResult
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.store.batches import ItemOutcome
from toolcrew.store.run_queue import RunClaim

_INPUT_CODES = frozenset(
    {
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.UNKNOWN_TENANT,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.TOOL_NOT_FOUND,
        ErrorCode.TOOL_DISABLED,
        ErrorCode.INVALID_ARGUMENTS,
        ErrorCode.FILE_NOT_FOUND,
        ErrorCode.FILE_TOO_LARGE,
        ErrorCode.PATH_NOT_ALLOWED,
    }
)
_BUSY_CODES = frozenset(
    {
        ErrorCode.RATE_LIMITED,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.BUDGET_EXCEEDED,
        ErrorCode.SESSION_NOT_FOUND,
        ErrorCode.SESSION_BUSY,
    }
)
"""Error codes whose cause is not in the item, so that another attempt may succeed."""

CONTEXT_WINDOW_EXCEEDED, MODEL_REFUSED, ORCHESTRATOR_LOST, GRADER_ERROR = (
    "context_window_exceeded",
    "model_refused",
    "orchestrator_lost",
    "grader_error",
)
"""Failure codes of items, in addition to the error codes of calls."""

_STOP_MESSAGES: dict[StopReason, str] = {
    StopReason.MAX_ITERATIONS: (
        "the run reached its step limit while the model still called tools: allow more (max_iterations)"
    ),
    StopReason.MAX_WALL: "the run reached its time limit (max_wall_s)",
    StopReason.MAX_TOKENS: "the run reached its token limit (max_tokens)",
    StopReason.MAX_COST: "the run reached its cost limit (max_cost)",
    StopReason.REPEATED_FAILURE: "the model repeated a call that failed, with the same arguments",
    StopReason.MALFORMED_REPLY: "the model wrote calls that could not be read, several times",
    StopReason.EMPTY_REPLY: "the model sent an empty answer",
    StopReason.CUT_REPLY: "the answer was cut at the model's token limit",
    StopReason.CONTENT_FILTER: "a content filter stopped the answer",
    StopReason.REFUSED: "the model refused the request",
    StopReason.FAILED_REPLY: "the model server failed during the answer",
    StopReason.UNKNOWN_END: "the answer ended in an unknown way, so it may be incomplete",
}
_NAMED = (StopReason.CONTENT_FILTER, StopReason.FAILED_REPLY, StopReason.UNKNOWN_END)
"""Stop reasons whose message names the server's word, which says more than ours."""
_BUDGET_MESSAGE = "a budget of the tenant is used up: retry after its reset, which `toolcrew tenants usage` shows"


def judge_run(result: RunResult) -> Failure | None:
    """Return the failure of a run; None if the run has an answer."""
    if result.stop_reason is StopReason.ANSWERED:
        return None
    if result.stop_reason is StopReason.BUDGET_EXCEEDED:
        return Failure(kind=FailureKind.INFRASTRUCTURE, code=ErrorCode.BUDGET_EXCEEDED.value, message=_BUDGET_MESSAGE)
    message, word = _STOP_MESSAGES[result.stop_reason], result.finish_reason
    named = f" (finish_reason {word})" if word and result.stop_reason in _NAMED else ""
    return Failure(kind=FailureKind.MODEL, code=result.stop_reason.value, message=f"{message}{named}")


def judge_call(result: ToolResult) -> Failure | None:
    """Return the failure of an item that is a single call; None if the call succeeded."""
    if result.success:
        return None
    code = result.error_code or ErrorCode.INTERNAL
    # Whether the deadline passed before a worker took the call.
    has_not_begun = code is ErrorCode.TIMEOUT and result.sandbox is None and not result.clocks.run_s
    # Its own program may have ended the sandbox, and the call may have acted: a new attempt would act twice.
    has_ended_sandbox = code is ErrorCode.SANDBOX_UNAVAILABLE and result.sandbox is not None
    is_ours = (code in OPERATOR_CODES and not has_ended_sandbox) or code in _BUSY_CODES or has_not_begun
    kind = FailureKind.INFRASTRUCTURE if is_ours else FailureKind.TOOL
    return Failure(kind=kind, code=code.value, message=result.error or "the call failed")


def judge_error(error: BaseException) -> Failure:
    """Return the failure for an error that ended an item. An error of an unexpected type is a defect and has the code
    INTERNAL.
    """
    match error:
        case ContextWindowExceeded():
            return Failure(kind=FailureKind.MODEL, code=CONTEXT_WINDOW_EXCEEDED, message=str(error))
        case ModelRefused():
            return Failure(kind=FailureKind.MODEL, code=MODEL_REFUSED, message=str(error))
        case ModelDenied():
            return Failure(kind=FailureKind.INPUT, code=error.code.value, message=str(error))
        case ModelUnavailable() | BrokerUnavailable():
            return Failure(kind=FailureKind.INFRASTRUCTURE, code=error.code.value, message=str(error))
        case ConfigError():
            return Failure(kind=FailureKind.INPUT, code=error.code.value, message=str(error))
        case OperatorError():
            return Failure(kind=FailureKind.INFRASTRUCTURE, code=error.code.value, message=str(error))
        case ToolFailure():
            kind = FailureKind.INPUT if error.code in _INPUT_CODES else FailureKind.INFRASTRUCTURE
            return Failure(kind=kind, code=error.code.value, message=error.message)
        case _:
            return Failure(
                kind=FailureKind.INFRASTRUCTURE,
                code=ErrorCode.INTERNAL.value,
                message=f"{type(error).__name__}: {error}",
            )


def judge_losses(times: int) -> Failure:
    """Return the failure of an item whose run was executed by `times` processes in a row that died."""
    message = (
        f"the process that ran the item died or lost its connection to Redis {times} times in a row, and the item made "
        "no progress: check the log and the memory of that process, then retry the item"
    )
    return Failure(kind=FailureKind.INFRASTRUCTURE, code=ORCHESTRATOR_LOST, message=message)


def build_outcome(claim: RunClaim, failure: Failure | None, body: Mapping[str, Any] | None = None) -> ItemOutcome:
    """Return the outcome of a claimed run. `failure` None: the run succeeded."""
    record = claim.record
    return ItemOutcome(
        custom_id=record.item.custom_id,
        run=claim.run,
        status_code=status_of(failure),
        body=body,
        failure=failure,
        attempt=record.attempt,
        task=record.item.task,
    )


def status_of(failure: Failure | None) -> int:
    """Return the HTTP status code of the row."""
    if failure is None:
        return 200
    kinds = {FailureKind.INPUT: 400, FailureKind.CANCELLED: 499, FailureKind.INFRASTRUCTURE: 503}
    return kinds.get(failure.kind, 422)
