"""A row states how its item ended, in the format of OpenAI's batch output."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from toolcrew.contract.calls import CallUsage, Clocks
from toolcrew.contract.run_events import Failure, FailureKind
from toolcrew.orchestrator.batches.rows import (
    build_answer_body,
    build_chat_body,
    build_row,
    build_row_line,
    build_run_body,
    parse_row,
)
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.loop.agent import RunResult
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.loop.transcript import Transcript
from toolcrew.store.batches import CHAT_URL, RUNS_URL, ItemOutcome

slow_property = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OUTCOMES = st.builds(
    ItemOutcome,
    custom_id=TEXT.filter(bool),
    run=TEXT,
    status_code=st.integers(100, 599),
    body=st.none() | st.dictionaries(TEXT, JSON, max_size=3),
    failure=st.none() | st.builds(Failure, kind=st.sampled_from(FailureKind), code=TEXT, message=TEXT),
)


def build_result(**fields: Any) -> RunResult:
    defaults = {
        "answer": "42",
        "stop_reason": StopReason.ANSWERED,
        "steps": 2,
        "transcript": Transcript({"role": "user", "content": "6 * 7?"}),
        "usage": TokenUsage(10, 5),
        "clocks": Clocks(run_s=1.5),
        "run": "r1",
        "cost": 0.25,
    }
    return RunResult(**{**defaults, **fields})


@slow_property
@given(OUTCOMES)
def test_a_row_is_one_line_and_is_parsed_without_changes(outcome: ItemOutcome) -> None:
    line = build_row_line(build_row(outcome))
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1
    row = parse_row(line)
    assert (row.id, row.custom_id, row.is_success) == (outcome.run, outcome.custom_id, outcome.failure is None)
    assert (row.error.model_dump() if row.error else None) == (
        outcome.failure.model_dump() if outcome.failure else None
    )
    assert (row.response.body if row.response else None) == (outcome.body if outcome.failure else outcome.body or {})
    assert row.response is None or (row.response.status_code, row.response.request_id) == (
        outcome.status_code,
        outcome.run,
    )


def test_a_row_has_the_openai_fields_and_the_failure_kind() -> None:
    done = ItemOutcome(custom_id="a", run="r1", status_code=200, body={"x": 1})
    assert build_row(done) == {
        "id": "r1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"x": 1}},
        "error": None,
    }
    failure = Failure(kind=FailureKind.TOOL, code="TIMEOUT", message="it took too long")
    failed = ItemOutcome(custom_id="a", run="r1", status_code=500, failure=failure)
    assert build_row(failed) == {
        "id": "r1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "TIMEOUT", "message": "it took too long", "kind": "tool"},
    }


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"id": "a"}',
        b'{"id": "a", "custom_id": "", "response": null, "error": null}',
        b"[" * 5000,
    ],
)
def test_a_line_that_is_not_a_row_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a row of a batch"):
        parse_row(line)


def test_a_lone_surrogate_in_a_body_is_preserved() -> None:
    row = parse_row(
        build_row_line(build_row(ItemOutcome(custom_id="a", run="r", status_code=200, body={"name": "x\udcff\u2028"})))
    )
    assert row.response is not None
    assert row.response.body == {"name": "x\udcff\u2028"}


def test_a_body_of_maximum_depth_can_be_parsed_again() -> None:
    deepest = None
    body: Any = {}
    for _ in range(600):
        body = {"x": body}
        try:
            deepest = ItemOutcome(custom_id="a", run="r", status_code=200, body=body)
        except ValidationError:
            break
    assert deepest is not None
    assert parse_row(build_row_line(build_row(deepest))).custom_id == "a"


def test_the_body_of_a_run_contains_only_the_requested_fields() -> None:
    body = build_run_body(build_result())
    assert body == {
        "run": "r1",
        "answer": "42",
        "stop_reason": "answered",
        "finish_reason": None,
        "steps": 2,
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 0},
        "cost": 0.25,
        "clocks": {"queued_s": 0.0, "sandbox_s": 0.0, "run_s": 1.5, "transfer_s": 0.0},
        "call_usage": CallUsage().model_dump(),
        "sandbox_s": 0.0,
    }
    body_with_extras = build_answer_body(
        RUNS_URL, build_result(), model="m", created=1.0, has_transcript=True, artifacts=["out/a.csv"]
    )
    assert body_with_extras == {
        **body,
        "transcript": [{"role": "user", "content": "6 * 7?"}],
        "artifacts": ["out/a.csv"],
    }


@pytest.mark.parametrize(
    ("reason", "finish"),
    [(StopReason.ANSWERED, "stop"), (StopReason.CUT_REPLY, "length"), (StopReason.MAX_ITERATIONS, "length")],
)
def test_the_body_of_a_chat_is_valid_for_the_openai_client(reason: StopReason, finish: str) -> None:
    body = build_answer_body(CHAT_URL, build_result(stop_reason=reason), model="m", created=1.9)
    assert body == build_chat_body(build_result(stop_reason=reason), model="m", created=1.9)
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.model_extra == {}
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("42", finish)
    assert completion.created == 1
    assert completion.usage is not None
    assert completion.usage.total_tokens == 15
