"""The traceparent of a call: valid values, and the envelope with and without a traceparent."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.calls import ToolContext
from contract.envelope import decode_call, encode_call
from contract.traceparent import SpanRef, attempt_span_id, call_span_id, parse_traceparent, run_span_id, trace_id_of
from tests.builders import KEY, build_call

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DIGITS = "0123456789abcdef"


def ids(length: int) -> st.SearchStrategy[str]:
    return st.text(DIGITS, min_size=length, max_size=length).filter(lambda text: set(text) != {"0"})


def context(trace: str | None) -> ToolContext:
    return ToolContext(tenant="acme", sent_at=1.0, deadline_at=2.0, trace=trace)


@given(ids(32), ids(16), st.booleans())
def test_a_written_header_is_read_back(trace: str, span: str, is_sampled: bool) -> None:
    ref = SpanRef(trace, span, is_sampled)
    assert parse_traceparent(str(ref)) == ref
    assert context(str(ref)).trace == str(ref)


@given(st.integers(0, 255))
def test_only_the_sampled_flag_counts(flags: int) -> None:
    assert parse_traceparent(f"{GOOD[:-2]}{flags:02x}").is_sampled == bool(flags & 1)


@given(st.text(max_size=80) | st.text("0123456789abcdefABCDEF-", min_size=50, max_size=60))
def test_any_other_text_is_refused_and_nothing_else_happens(text: str) -> None:
    if re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", text, re.ASCII):
        return
    with pytest.raises(ValueError, match="traceparent"):
        parse_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        GOOD.upper(),
        f"{GOOD}\n",
        f" {GOOD}",
        f"{GOOD}-more",
        GOOD.replace("00-", "ff-", 1),
        GOOD.replace("00-", "01-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        GOOD.replace("0af7", "٠af7"),
        "",
    ],
)
def test_a_similar_header_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="traceparent"):
        parse_traceparent(text)
    with pytest.raises(ValueError, match="traceparent"):
        context(text)


def test_a_context_takes_it_in_one_form_only() -> None:
    with pytest.raises(ValueError, match="unsupported flags"):
        context(f"{GOOD[:-2]}03")


def test_an_envelope_without_a_trace_has_no_field_for_it_which_earlier_releases_would_refuse() -> None:
    untraced = json.loads(encode_call(build_call(), context(None), KEY).split(".", 3)[3])
    assert "trace" not in untraced["context"]


def test_a_trace_travels_signed_with_its_call() -> None:
    envelope = encode_call(build_call(), context(GOOD), KEY)
    assert decode_call(envelope, KEY)[1].trace == GOOD
    with pytest.raises(Exception, match="signature does not match"):
        decode_call(envelope.replace(GOOD, f"{GOOD[:-1]}0"), KEY)


def test_ids_of_runs_calls_and_attempts_are_those_that_another_process_makes() -> None:
    made = [run_span_id("acme", "r"), call_span_id("c"), attempt_span_id("c", 1), attempt_span_id("c", 2)]
    assert len(set(made)) == 4
    parse_traceparent(str(SpanRef(trace_id_of("acme", "r"), made[0])))
    assert trace_id_of("acme", "r") == trace_id_of("acme", "r") != trace_id_of("acm", "er")
