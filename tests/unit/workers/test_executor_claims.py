"""A call that could not be claimed: the conditions under which it may be sent again."""

from typing import Any

import pytest

from tests.support.records.builders import build_call, build_context
from tests.unit.workers.test_executor import Harness
from toolcrew.contract.calls import RunFailure
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode
from toolcrew.store.call_records import CallClaim


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (BrokerUnavailable("Redis does not answer"), ErrorCode.BROKER_UNAVAILABLE, "broker"),
        (TypeError("a bug of ours"), ErrorCode.INTERNAL, None),
    ],
)
def test_only_an_unreachable_redis_marks_a_call_as_not_run(
    error: Exception, code: ErrorCode, reason: str | None
) -> None:
    harness = Harness()

    def claim(*_: Any) -> CallClaim:
        raise error

    harness.ledger.claim = claim  # type: ignore[method-assign]
    result = harness.execute(build_call(text="hi"))
    assert (result.error_code, result.metadata.get("not_run"), harness.runs) == (code, reason, 0)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_call_with_invalid_arguments_is_claimed_before_it_is_refused(is_away: bool) -> None:
    harness = Harness()
    claim, order = harness.ledger.claim, []

    def claim_and_note(call: Any, context: Any, holder: str, meanwhile: Any) -> CallClaim:
        order.append("claim")
        if is_away:
            raise BrokerUnavailable("Redis does not answer")
        return claim(call, context, holder, meanwhile)

    harness.ledger.claim = claim_and_note  # type: ignore[method-assign,assignment]
    result = harness.execute(build_call(words="hi"))
    assert (result.error_code, harness.runs, order) == (ErrorCode.INVALID_ARGUMENTS, 0, ["claim"])
    assert harness.ledger.refused == (set() if is_away else {("acme", "call-1")})


@pytest.mark.parametrize("blob", ["arguments_blob", "blob"])
def test_a_claimed_call_whose_content_redis_does_not_return_is_not_refused_but_sent_again(
    blob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may stop between the claim and the reads before the start of the tool."""
    harness = Harness()

    def take(*_: Any) -> bytes:
        raise BrokerUnavailable("Redis does not answer")

    monkeypatch.setattr(harness.blobs, "take", take)
    result = harness.execute(build_call(text="hi"), build_context(**{blob: "key"}))
    assert (result.error_code, result.run_failure) == (ErrorCode.BROKER_UNAVAILABLE, RunFailure.BROKER)
    assert (harness.runs, harness.ledger.refused) == (0, set())
