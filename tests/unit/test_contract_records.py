"""Records: frozen, closed and bounded, and the text form of a result."""

from typing import Any

import pytest
from pydantic import ValidationError

from contract import errors
from contract.calls import ExecResult, KillReport, Record, ToolCall, ToolContext, ToolResult
from contract.errors import OPERATOR_CODES, ErrorCode, OperatorError, ToolcrewError, ToolFailure
from contract.specs import Catalog, ToolSpec
from tests.builders import build_call, build_context, build_spec

KILL = {"signalled": 1, "survivors": 0, "method": "tree", "ms": 1.0}


@pytest.mark.parametrize(
    "record",
    [
        build_call(),
        build_context(),
        build_spec(),
        KillReport(**KILL),
        ToolResult(call_id="c", name="x", success=True),
        Catalog(),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_cannot_be_changed_and_takes_no_unknown_field(record: Record) -> None:
    name = next(iter(type(record).model_fields))
    with pytest.raises(ValidationError):
        setattr(record, name, "other")
    with pytest.raises(ValidationError, match=r"[Ee]xtra"):
        type(record).model_validate({**record.model_dump(), "unknown": 1})


def test_a_record_keeps_its_own_copy_of_what_it_was_given() -> None:
    given = {"text": "a"}
    call = ToolCall(id="c", name="x", arguments=given)
    given["text"] = "b"
    assert call.arguments == {"text": "a"}


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


def test_a_deadline_is_a_number_that_can_pass() -> None:
    with pytest.raises(ValidationError):
        build_context(deadline_at=float("nan"))


def test_text_of_a_result_is_capped() -> None:
    ToolResult(call_id="c", name="x", success=True, output="x" * 256 * 1024)
    with pytest.raises(ValidationError):
        ToolResult(call_id="c", name="x", success=True, output="x" * (256 * 1024 + 1))
    with pytest.raises(ValidationError):
        ToolResult(call_id="c", name="x" * 129, success=True)


def test_a_failure_with_a_long_sentence_is_still_a_result() -> None:
    result = ToolResult.failed(build_call(), ErrorCode.INVALID_ARGUMENTS, "x" * 20_000)
    assert result.error_code is ErrorCode.INVALID_ARGUMENTS


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


@pytest.mark.parametrize(
    "change", [{"method": "magic"}, {"signalled": -1}, {"survivors": -1}, {"ms": -1}, {"extra": 1}, {"ms": None}]
)
def test_a_kill_report_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KillReport(**{**KILL, **change})


def test_the_set_of_error_codes_is_closed() -> None:
    with pytest.raises(ValueError, match="NEW_CODE"):
        ErrorCode("NEW_CODE")
    assert all(code.value == code.name for code in ErrorCode)


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


def test_every_error_of_ours_is_in_the_tree_that_the_docstring_draws() -> None:
    ours = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ToolcrewError)]
    assert all(kind.__name__ in str(errors.__doc__) for kind in ours)
    assert all(kind.code in ErrorCode for kind in ours if issubclass(kind, OperatorError))


def test_a_failure_carries_code_sentence_and_metadata() -> None:
    failure = ToolFailure(ErrorCode.NO_MATCH, "no match", near=["a"])
    assert (failure.code, str(failure), failure.metadata) == (ErrorCode.NO_MATCH, "no match", {"near": ["a"]})


def test_a_failed_result_says_for_which_call() -> None:
    result = ToolResult.failed(build_call(call_id="c9"), ErrorCode.NO_MATCH, "no match", metadata={"near": 1})
    assert (result.call_id, result.name, result.success, result.metadata) == ("c9", "echo", False, {"near": 1})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(call_id="c", name="x", success=True, output="hi"), "hi"),
        (ToolResult(call_id="c", name="x", success=True), ""),
        (ToolResult.failed(build_call(), ErrorCode.TIMEOUT, "too slow"), "Error [TIMEOUT]: too slow"),
        (
            ToolResult.failed(build_call(), ErrorCode.TIMEOUT, "too slow", output="half"),
            "Error [TIMEOUT]: too slow\nhalf",
        ),
    ],
)
def test_a_model_reads_the_output_or_the_error_and_what_was_printed(result: ToolResult, text: str) -> None:
    assert result.text() == text


def test_bytes_survive_json() -> None:
    result = ExecResult(returncode=-9, stdout=b"\xff\x00", stderr=b"", kill=KillReport(**KILL))
    assert ExecResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize(
    "change", [{"name": ""}, {"description": ""}, {"parameters": []}, {"audience": "all"}, {"description": "x" * 8193}]
)
def test_a_spec_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ToolSpec(**{"name": "x", "description": "d", "parameters": {}, **change})
