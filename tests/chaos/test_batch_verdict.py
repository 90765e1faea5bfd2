"""The check of batches under chaos detects each failure. Otherwise a passed round would prove nothing."""

from typing import Any

import pytest

from tests.chaos.batch_verdict import Evidence, judge_batch

HERE, ELSEWHERE = "a" * 32, "b" * 32


def row(item: str = "m-0", answer: str = f"{HERE} 0,1") -> dict[str, Any]:
    return {"custom_id": item, "response": {"body": {"answer": answer}}, "error": None}


def failed(item: str = "m-0") -> dict[str, Any]:
    return {"custom_id": item, "response": None, "error": {"code": "HOST_LOST"}}


def evidence(**changes: Any) -> Evidence:
    """Return the evidence of one item with two successful calls."""
    plain: dict[str, Any] = {
        "items": ["m-0"],
        "calls": 2,
        "rows": {"one": [row()], "two": [row()]},
        "acts": {"m-0": {0: [HERE], 1: [HERE]}},
        "attempts": {"m-0": 1},
        "replies": {"m-0": {0: 1, 1: 1, 2: 1}},
    }
    return Evidence(**{**plain, **changes})


def test_an_item_with_one_row_whose_calls_acted_once_passes() -> None:
    verdict = judge_batch(evidence())

    assert (verdict.wrong, verdict.items, verdict.acts, verdict.unknown) == ((), 1, 2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"one": [row()], "two": []}}, "has 0 rows of orchestrator two"),
        ({"rows": {"one": [row(), row()]}}, "has 2 rows"),
        ({"rows": {"one": [row()], "two": [row(), row("m-9")]}}, "which is no item"),
        ({"rows": {"one": [failed()]}}, "failed in the end"),
        (
            {"acts": {"m-0": {0: [HERE, HERE], 1: [HERE]}}, "may_lose": True},
            "acted 2 times at step 0 and was begun 1 times",
        ),
        (
            {"acts": {"m-0": {0: [HERE, ELSEWHERE], 1: [HERE]}}, "may_lose": True},
            "acted 2 times at step 0 and was begun 1 times",
        ),
        (
            {"acts": {"m-0": {0: [HERE, HERE], 1: [HERE]}}, "attempts": {"m-0": 2}, "may_lose": True},
            "acted 2 times at step 0 of one attempt",
        ),
        (
            {"rows": {"one": [row(answer=f"{HERE} 0")]}, "calls": 1, "acts": {"m-0": {0: [HERE], 1: [ELSEWHERE]}}},
            "in 2 workspaces",
        ),
        ({"attempts": {"m-0": 2}}, "begun 2 times though only orchestrators"),
        ({"acts": {"m-0": {0: [HERE]}}, "may_lose": True}, "tells that it acted at steps [0, 1]"),
        ({"rows": {"one": [row(answer=f"{HERE} 0,1,1")]}, "may_lose": True}, "tells that it acted at steps [0, 1, 1]"),
        ({"rows": {"one": [row(answer=f"{HERE} 0")]}, "acts": {"m-0": {0: [HERE]}}}, "acted at steps [0] of 2"),
        ({"acts": {"m-0": {0: [HERE], 1: [HERE]}, "m-7": {0: [HERE]}}}, "m-7 acted, and is no item"),
        ({"replies": {"m-0": {0: 2, 1: 1, 2: 1}}}, "answered 1 times more"),
        ({"replies": {"m-0": {0: 2, 1: 2, 2: 1}}, "struck": {"m-0": 1}}, "answered 2 times more"),
    ],
)
def test_every_violation_of_a_batch_is_reported(changes: dict[str, Any], message: str) -> None:
    (sentence,) = judge_batch(evidence(**changes)).wrong

    assert message in sentence


def test_a_model_reply_may_be_repeated_once_for_each_kill_of_its_run() -> None:
    verdict = judge_batch(evidence(replies={"m-0": {0: 2, 1: 1, 2: 1}}, struck={"m-0": 1}))

    assert (verdict.wrong, verdict.replies_repeated) == ((), 1)


def test_a_call_with_an_unknown_outcome_may_have_acted_or_not() -> None:
    told_one = {"one": [row(answer=f"{HERE} 0")]}

    assert judge_batch(evidence(rows=told_one, acts={"m-0": {0: [HERE]}}, may_lose=True)).wrong == ()
    assert judge_batch(evidence(rows=told_one, may_lose=True)).wrong == ()


def test_a_session_moved_to_another_host_may_act_in_another_workspace() -> None:
    moved = evidence(rows={"one": [row(answer=f"{HERE} 1")]}, acts={"m-0": {0: [ELSEWHERE], 1: [HERE]}}, may_lose=True)

    assert judge_batch(moved).wrong == ()


def test_a_restarted_item_acts_again_once() -> None:
    anew = {"m-0": {0: [ELSEWHERE, HERE], 1: [HERE]}}

    assert (
        judge_batch(evidence(acts=anew, attempts={"m-0": 2}, may_lose=True, replies={"m-0": {0: 2, 1: 1, 2: 1}})).wrong
        == ()
    )
