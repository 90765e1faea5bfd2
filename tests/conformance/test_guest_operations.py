"""The records of the guest's operations in contract agree with the classes of the guest, field by field."""

import dataclasses
import inspect

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT
from toolcrew.contract.guest_protocol import REQUESTS, GuestAnswer
from toolcrew.workers.sandboxd.sandbox import SANDBOXD_FIELDS

assert GUEST_PARENT  # this import makes the guest importable
from guest.call_pipes import STREAMS  # noqa: E402
from guest.requests import REQUESTS as GUEST_REQUESTS  # noqa: E402

OF_THE_GUEST = {"run_s", "kill"}


def test_both_sides_have_the_same_operations() -> None:
    assert REQUESTS.keys() == GUEST_REQUESTS.keys()


@pytest.mark.parametrize("op", REQUESTS)
def test_a_request_has_the_same_name_and_fields_on_both_sides(op: str) -> None:
    ours, theirs = REQUESTS[op], GUEST_REQUESTS[op]
    assert (op, op) == (ours.OP, theirs.OP)
    assert ours.__name__ == theirs.__name__
    assert {field.name for field in dataclasses.fields(ours)} == {*theirs.FIELDS, "timeout_s"}


@pytest.mark.parametrize("op", REQUESTS)
def test_a_request_declares_only_streams_that_the_guest_sends(op: str) -> None:
    assert set(STREAMS) >= REQUESTS[op].STREAMS


def test_every_stream_of_the_guest_belongs_to_a_request() -> None:
    assert set(STREAMS) == set().union(*(request.STREAMS for request in REQUESTS.values()))


def test_sandboxd_protects_every_field_that_it_adds_to_an_answer() -> None:
    assert GuestAnswer.model_fields.keys() - OF_THE_GUEST <= SANDBOXD_FIELDS


@pytest.mark.parametrize("op", REQUESTS)
def test_no_field_of_an_operation_has_the_name_of_a_field_of_sandboxd(op: str) -> None:
    own = REQUESTS[op].ANSWER.model_fields.keys() - GuestAnswer.model_fields.keys()
    assert not own & SANDBOXD_FIELDS


@pytest.mark.parametrize("op", [op for op, request in GUEST_REQUESTS.items() if hasattr(request, "SERVER")])
def test_the_function_that_serves_a_request_exists(op: str) -> None:
    module, function = GUEST_REQUESTS[op].SERVER
    served = getattr(__import__(module, fromlist=(function,)), function)
    assert list(inspect.signature(served).parameters) == ["request", "context"]
