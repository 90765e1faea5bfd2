"""Tests of the shop's tools in a worker without a pool: schema, validators, hard limit, one result."""

import order_tools

from toolcrew import ErrorCode, LocalWorker

WORKER = LocalWorker(order_tools, config={"currency": "JPY"})


def test_a_call_has_one_result() -> None:
    filled = WORKER.call("add_to_basket", {"article": "lamp", "pieces": 2}, session="s1")
    assert (filled.error, filled.output) == (None, '{"lamp": 2}')


def test_a_failure_says_what_to_do() -> None:
    result = WORKER.call("add_to_basket", {"article": "sofa"})
    assert result.error_code == ErrorCode.NO_MATCH
    assert result.error == "there is no article 'sofa': the articles are chair, lamp"


def test_wrong_arguments_never_reach_the_function() -> None:
    result = WORKER.call("quote_basket", {"express": "dash"})
    assert result.error_code == ErrorCode.INVALID_ARGUMENTS


def test_a_call_has_a_hard_limit() -> None:
    assert {spec.name: spec.timeout_s for spec in WORKER.specs()}["quote_basket"] == 5
