"""Redis is killed during all operations of HTTP API clients, and comes back. Each client gets an error in time, and
nothing is done twice.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.api_stack import open_api_stack
from tests.outage_requests import REQUESTS, ApiRequest, Seen
from tests.outage_story import BAD_KEYS, CALLS, PAGES, RULES, STEPS, Outage, play_outage
from tests.stack import open_redis_server

pytestmark = pytest.mark.stack

ANSWERED_S = 10.0
WORDS = ("127.0.0.1", "a-test-password", "Traceback", "redis.exceptions", "Connection refused", 'File "')
"""Texts that only a log may contain: the address of Redis, and internal errors."""
EACH = pytest.mark.parametrize("api_request", REQUESTS, ids=lambda api_request: api_request.name)
POSTS = pytest.mark.parametrize(
    "api_request",
    [api_request for api_request in REQUESTS if api_request.method == "POST"],
    ids=lambda api_request: api_request.name,
)


@pytest.fixture(scope="module")
def outage(engine: APIClient) -> Iterator[Outage]:
    with open_redis_server() as server, open_api_stack(engine, server.url, RULES) as stack:
        yield asyncio.run(play_outage(stack, server))


def check_away(reply: Seen) -> None:
    """Fail unless the response reported in time that Redis is unavailable, without further details."""
    assert (reply.status, reply.code) == (503, "BROKER_UNAVAILABLE"), reply
    assert reply.took_s < ANSWERED_S
    assert int(reply.headers["retry-after"]) >= 1
    assert not [word for word in WORDS if word in reply.text]


@EACH
def test_a_request_is_answered_503_while_redis_is_down(outage: Outage, api_request: ApiRequest) -> None:
    check_away(outage.shallow[api_request.name])


@EACH
def test_a_request_that_passed_the_key_check_is_answered_503_while_redis_is_down(
    outage: Outage, api_request: ApiRequest
) -> None:
    check_away(outage.deep[api_request.name])


@EACH
def test_a_repeated_request_succeeds_after_redis_is_back(outage: Outage, api_request: ApiRequest) -> None:
    assert outage.after[api_request.name].status == api_request.done, outage.after[api_request.name]


@POSTS
def test_a_post_with_an_idempotency_key_is_executed_once(outage: Outage, api_request: ApiRequest) -> None:
    again = outage.again[api_request.name]
    if api_request.name == "make a key":
        # The API returns a secret only once.
        assert (again.status, again.code) == (409, "CONFLICT")
    elif api_request.done < 300:
        assert (again.text, again.headers["idempotent-replayed"]) == (outage.after[api_request.name].text, "true")


def test_each_requested_object_is_created_once(outage: Outage) -> None:
    assert {kind: len(made) for kind, made in outage.owned.items()} == {
        "runs": 1,
        "batches": 1,
        "sessions": 1,
        "keys": 1,
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_flight_returns_its_result_once(outage: Outage, name: str) -> None:
    result = outage.calls[name]
    assert (result["status"], result["success"], result["output"]) == (200, True, "begun\nended\n"), result
    assert outage.acted[name] == 1


def test_a_repeated_call_is_answered_with_the_stored_response(outage: Outage) -> None:
    assert outage.repeated is not None
    assert (outage.repeated.status, outage.repeated.headers["idempotent-replayed"]) == (200, "true")
    assert json.loads(outage.repeated.text)["output"] == "begun\nended\n"


def test_a_call_sent_during_the_outage_is_refused_or_executed_once(outage: Outage) -> None:
    sent_reply = outage.sent_into
    assert sent_reply is not None
    assert not [word for word in WORDS if word in sent_reply.text]
    acted = outage.acted["into"]
    if sent_reply.status == 503:
        check_away(sent_reply)
        assert acted == 0
    else:
        reply = json.loads(sent_reply.text)
        assert (reply["success"], acted) == (True, 1) or (reply["error_code"], acted) == ("BROKER_UNAVAILABLE", 0), (
            reply
        )


def test_a_call_sent_during_and_after_the_outage_is_executed_once(outage: Outage) -> None:
    assert outage.acted["call a tool"] == 1


def test_a_run_continues_to_its_answer_after_the_outage(outage: Outage) -> None:
    assert (outage.run["state"], outage.run["answer"]) == ("succeeded", f"{STEPS} steps"), outage.run


def test_a_run_event_stream_delivers_every_event_once(outage: Outage) -> None:
    got = [event for part in outage.followed for event in part]
    assert [event["id"] for event in got] == [event["id"] for event in outage.whole]
    assert got == outage.whole
    assert [event["event"] for event in got].count("RunEnded") == 1
    assert len([event for event in got if event["event"] == "CallFinished"]) == STEPS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reports_the_outage_in_plain_text(outage: Outage, page: str) -> None:
    reply = outage.pages[page]
    assert (reply.status, reply.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert "Redis does not answer" in reply.text
    assert reply.took_s < ANSWERED_S
    assert not [word for word in WORDS if word in reply.text]
    assert outage.pages_after[page].status == 200


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_request_with_an_invalid_key_gets_no_details_of_the_outage(outage: Outage, name: str) -> None:
    reply = outage.strangers[name]
    if name == "unknown":
        assert (reply.status, reply.text) == (503, outage.strangers["good"].text)
    else:
        assert reply.status == 401
    assert not [word for word in WORDS if word in reply.text]


def test_the_services_log_no_internal_error_during_the_outage(outage: Outage) -> None:
    assert "api_failed" not in outage.logs
    assert "Traceback" not in outage.logs
