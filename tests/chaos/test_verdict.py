"""The check of chaos rounds detects each failure. Otherwise a passed round would prove nothing."""

from typing import Any

import pytest

from tests.chaos.usage import StoredUsage, judge_usage
from tests.chaos.verdict import LONGEST_S, judge


def sent(call: str = "d-1", tool: str = "bash_tool") -> dict[str, Any]:
    return {"event": "sent", "driver": "d", "call": call, "tool": tool, "session": "s"}


def result(call: str = "d-1", **changes: Any) -> dict[str, Any]:
    plain = {"success": True, "code": None, "error": None, "output": f"acted {call}", "answers": call, "took_s": 0.1}
    return {"event": "result", "driver": "d", "call": call, **plain, **changes}


def failed(code: str) -> dict[str, Any]:
    return result(success=False, code=code, error="a sentence", output="")


def test_a_call_that_acted_once_and_was_answered_once_passes() -> None:
    verdict = judge([sent(), result()], {"d-1": 1}, [])

    assert (verdict.wrong, verdict.calls, verdict.succeeded, verdict.unanswered) == ((), 1, 1, 0)


@pytest.mark.parametrize(
    ("lines", "acts", "message"),
    [
        ([sent(), result(), result()], {"d-1": 1}, "got 2 results"),
        ([sent()], {}, "got no result"),
        ([sent(), failed("OUTCOME_UNKNOWN")], {"d-1": 2}, "acted 2 times"),
        ([sent(), result()], {}, "answered as a success and acted 0 times"),
        ([sent(), result(output="acted d-2")], {"d-1": 1}, "answered as a success"),
        ([sent(), failed("HOST_LOST")], {"d-1": 1}, "never started"),
        ([sent(), result(answers="d-2")], {"d-1": 1}, "got the result of d-2"),
        ([sent(), result(took_s=LONGEST_S + 1)], {"d-1": 1}, "took"),
        ([sent(), failed("INTERNAL")], {}, "met a bug"),
        ([sent(tool="read_tool"), result(output="nothing")], {}, "read something else"),
        ([], {"d-9": 1}, "no client sent it"),
    ],
)
def test_every_violation_of_a_call_is_reported(lines: list[dict[str, Any]], acts: dict[str, int], message: str) -> None:
    (sentence,) = judge(lines, acts, []).wrong

    assert message in sentence


@pytest.mark.parametrize("code", ["OUTCOME_UNKNOWN", "TIMEOUT", "SANDBOX_UNAVAILABLE"])
@pytest.mark.parametrize("acted", [0, 1])
def test_a_call_with_an_unknown_outcome_may_have_acted_or_not(code: str, acted: int) -> None:
    assert judge([sent(), failed(code)], {"d-1": acted}, []).wrong == ()


def test_calls_of_a_killed_orchestrator_need_no_result_and_act_at_most_once() -> None:
    assert judge([sent()], {"d-1": 1}, ["d"]).wrong == ()
    assert judge([sent()], {"d-1": 2}, ["d"]).wrong != ()


def test_usage_that_equals_the_sum_of_its_calls_and_sessions_passes() -> None:
    stored = StoredUsage({"calls": 1, "cpu_us": 5}, {"s": {"cpu_us": 3}, "t": {"cpu_us": 2}}, frozenset({"d-1"}))

    assert list(judge_usage(stored, [sent(), result(cpu_s=3e-6)])) == []


@pytest.mark.parametrize(
    ("tenant", "sessions", "ended", "message"),
    [
        ({"calls": 2}, {}, {"d-1"}, "2 calls were counted, and 1 have a result"),
        ({"calls": 1, "cpu_us": 4}, {"s": {"cpu_us": 2}}, {"d-1"}, "cpu_us: 4 of the tenant, and 2 of its sessions"),
        ({}, {}, set(), "d-1 succeeded, and its result is not counted"),
        ({"calls": 1, "cpu_us": 4}, {"s": {"cpu_us": 4}}, {"d-1"}, "its results have 1.5"),
    ],
)
def test_wrong_usage_is_reported(
    tenant: dict[str, int], sessions: dict[str, dict[str, int]], ended: set[str], message: str
) -> None:
    used = {"cpu_s": 1.5 if "have 1.5" in message else 0.0}
    (sentence,) = judge_usage(StoredUsage(tenant, sessions, frozenset(ended)), [sent(), result(**used)])

    assert message in sentence
