"""Calls with time left are sent again if their tenant's limits rejected them. No other calls are sent again."""

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from orchestrator.admission import NOT_ADMITTED, until_admitted

CALL = ToolCall(id="c", name="bash_tool", arguments={})


def refused(code: ErrorCode, **metadata: float | str) -> ToolResult:
    return ToolResult.failed(CALL, code, "no", metadata=dict(metadata))


@pytest.mark.parametrize(
    ("results", "sent"),
    [
        (
            [
                refused(ErrorCode.RATE_LIMITED, retry_after_s=0.0, **NOT_ADMITTED),
                refused(ErrorCode.RATE_LIMITED, retry_after_s=-1.0, **NOT_ADMITTED),
                refused(ErrorCode.TIMEOUT),
            ],
            3,
        ),
        ([refused(ErrorCode.RATE_LIMITED, retry_after_s=0.0)], 1),
        ([refused(ErrorCode.QUOTA_EXCEEDED, retry_after_s=0.0, **NOT_ADMITTED)], 1),
    ],
    ids=["let through in the end", "a tool's own word", "another code"],
)
async def test_a_call_is_sent_until_it_is_let_through(results: list[ToolResult], sent: int) -> None:
    waiting = list(results)

    async def send() -> ToolResult:
        return waiting.pop(0)

    assert await until_admitted(send) is results[-1]
    assert len(results) - len(waiting) == sent
