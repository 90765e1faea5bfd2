"""Records: frozen, closed and bounded, and the text form of a result."""

from typing import Any

import pytest
from pydantic import ValidationError

from contract.calls import ExecResult, KillReport, ToolCall, ToolContext, ToolResult
from contract.errors import OPERATOR_CODES, ErrorCode
from tests.builders import build_call, build_context, build_spec

KILL = {"signalled": 1, "survivors": 0, "method": "tree", "ms": 1.0}


@pytest.mark.parametrize("text", ["", "a b", "a/b", "a:b", "é", "a\n", "x" * 65, "..", "a*"])
def test_an_identifier_holds_nothing_that_a_redis_key_or_a_path_could_trip_over(text: str) -> None:
    with pytest.raises(ValidationError):
        ToolCall(id=text, name="x")
    with pytest.raises(ValidationError):
        ToolContext(tenant=text, sent_at=0, deadline_at=0)


@pytest.mark.parametrize("timeout_s", [0, -1, 86_400.1, float("nan"), float("inf")])
def test_a_limit_is_above_nothing_and_at_most_a_day(timeout_s: float) -> None:
    with pytest.raises(ValidationError):
        build_context(timeout_s=timeout_s)
    with pytest.raises(ValidationError):
        build_spec(timeout_s=timeout_s)


def test_text_of_a_result_is_capped() -> None:
    ToolResult(call_id="c", name="x", success=True, output="x" * 256 * 1024)
    with pytest.raises(ValidationError):
        ToolResult(call_id="c", name="x", success=True, output="x" * (256 * 1024 + 1))
    with pytest.raises(ValidationError):
        ToolResult(call_id="c", name="x" * 129, success=True)


@pytest.mark.parametrize(
    ("call_id", "name", "error", "fields"),
    [
        ("not an id", "", "", {}),
        ("", "x" * 500, "half \ud800", {}),
        ("é" * 500, "half \udc00", "x", {"output": "x" * 300_000}),
        ("c", "x", "x", {"metadata": {"a": object()}, "kill": 5}),
    ],
)
def test_a_failure_of_any_call_is_a_result(call_id: str, name: str, error: str, fields: dict[str, Any]) -> None:
    call = ToolCall.model_construct(id=call_id, name=name, arguments={})
    result = ToolResult.failed(call, ErrorCode.INVALID_ARGUMENTS, error, **fields)
    assert ToolResult.model_validate_json(result.model_dump_json()) == result


def test_a_failure_keeps_the_fields_that_fit() -> None:
    result = ToolResult.failed(build_call(), ErrorCode.TIMEOUT, "x", output="half", metadata={"a": object()})
    assert (result.output, result.metadata) == ("half", {})


def test_the_faults_of_the_model_are_not_the_operators() -> None:
    models = {
        ErrorCode.INVALID_ARGUMENTS,
        ErrorCode.TIMEOUT,
        ErrorCode.TOOL_NOT_FOUND,
        ErrorCode.FILE_NOT_FOUND,
        ErrorCode.CANCELLED,
    }
    assert not models & OPERATOR_CODES
    assert ErrorCode.OUTCOME_UNKNOWN in OPERATOR_CODES


def test_bytes_survive_json() -> None:
    result = ExecResult(returncode=-9, stdout=b"\xff\x00", stderr=b"", kill=KillReport(**KILL))
    assert ExecResult.model_validate_json(result.model_dump_json()) == result
