"""Calls that admission refused are sent again."""

import pytest

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.admission import NOT_ADMITTED, until_admitted

CALL = ToolCall(id="c", name="bash_tool", arguments={})


def build_refusal(code: ErrorCode, **metadata: float | str) -> ToolResult:
    return ToolResult.failed(CALL, code, "no", metadata=dict(metadata))


@pytest.mark.parametrize(
    ("results", "sent"),
    [
        (
            [
                build_refusal(ErrorCode.RATE_LIMITED, retry_after_s=0.0, **NOT_ADMITTED),
                build_refusal(ErrorCode.RATE_LIMITED, retry_after_s=-1.0, **NOT_ADMITTED),
                build_refusal(ErrorCode.TIMEOUT),
            ],
            3,
        ),
        ([build_refusal(ErrorCode.RATE_LIMITED, retry_after_s=0.0)], 1),
        ([build_refusal(ErrorCode.QUOTA_EXCEEDED, retry_after_s=0.0, **NOT_ADMITTED)], 1),
    ],
    ids=["admitted after two refusals", "rate limit of the tool", "another error code"],
)
async def test_a_call_is_sent_again_only_after_an_admission_refusal(results: list[ToolResult], sent: int) -> None:
    remaining = list(results)

    async def send() -> ToolResult:
        return remaining.pop(0)

    assert await until_admitted(send) is results[-1]
    assert len(results) - len(remaining) == sent
