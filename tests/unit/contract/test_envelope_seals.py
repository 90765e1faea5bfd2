"""Sealed results: a client with write access to Redis cannot forge the result of a call."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.records.builders import KEY, build_call, build_context
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.envelope import decode_call, decode_result, encode_call, encode_result
from toolcrew.contract.errors import EnvelopeRefused
from toolcrew.contract.signing import ResultSeal, SigningKeys

RESULT = ToolResult(call_id="c1", name="bash_tool", success=True, output="fine")
SEAL = ResultSeal(KEY, "acme")


@pytest.mark.parametrize(
    "seal",
    [None, ResultSeal(SigningKeys.of("a guess"), "acme"), ResultSeal(KEY, "rival"), ResultSeal(KEY, "acme", attempt=2)],
    ids=["unsigned", "another key", "another tenant", "another attempt"],
)
def test_a_result_that_is_not_signed_for_this_tenant_is_refused(seal: ResultSeal | None) -> None:
    with pytest.raises(EnvelopeRefused, match="TOOLCREW_SECRET") as refused:
        decode_result(encode_result(RESULT, seal=seal), SEAL)
    assert refused.value.reason == "signature"


def test_a_changed_result_record_is_refused() -> None:
    stored = encode_result(RESULT, seal=SEAL)
    assert decode_result(json.loads(json.dumps(stored)), SEAL) == RESULT
    stored["data"][0][0][0] = stored["data"][0][0][0].replace("fine", "evil")
    with pytest.raises(EnvelopeRefused):
        decode_result(stored, SEAL)


def test_a_sealed_call_is_not_a_result_and_a_sealed_result_not_a_call() -> None:
    call = encode_call(build_call(), build_context(), KEY).split(".", 1)[1]
    with pytest.raises(EnvelopeRefused):
        SEAL.open(call)
    with pytest.raises(EnvelopeRefused):
        decode_call(f"v3.{SEAL.close('{}')}", KEY)


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_sealed_text_is_opened_unchanged_and_unsealed_text_refused(text: str) -> None:
    assert SEAL.open(SEAL.close(text)) == text
    with pytest.raises(EnvelopeRefused):
        SEAL.open(text)
