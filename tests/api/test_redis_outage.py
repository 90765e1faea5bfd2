"""Redis is killed during all operations of HTTP API clients, and comes back. Each client gets an error in time, and
nothing is done twice.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.api_stack import open_api_stack
from tests.outage_requests import REQUESTS, ApiReply, ApiRequest
from tests.redis_outage import BAD_KEYS, CALLS, PAGES, RULES, STEPS, Outage, play_outage
from tests.stack import open_redis_server

pytestmark = pytest.mark.stack

REPLY_LIMIT_S = 10.0
INTERNAL_TEXTS = ("127.0.0.1", "a-test-password", "Traceback", "redis.exceptions", "Connection refused", 'File "')
"""Texts that only a log may contain: the address of Redis, and internal errors."""
EACH_REQUEST = pytest.mark.parametrize("api_request", REQUESTS, ids=lambda api_request: api_request.name)
EACH_POST = pytest.mark.parametrize(
    "api_request",
    [api_request for api_request in REQUESTS if api_request.method == "POST"],
    ids=lambda api_request: api_request.name,
)


@pytest.fixture(scope="module")
def outage(engine: APIClient) -> Iterator[Outage]:
    with open_redis_server() as server, open_api_stack(engine, server.url, RULES) as stack:
        yield asyncio.run(play_outage(stack, server))


def assert_unavailable(reply: ApiReply) -> None:
    """Fail unless the response reported in time that Redis is unavailable, without further details."""
    assert (reply.status, reply.code) == (503, "BROKER_UNAVAILABLE"), reply
    assert reply.took_s < REPLY_LIMIT_S
    assert int(reply.headers["retry-after"]) >= 1
    assert not [word for word in INTERNAL_TEXTS if word in reply.text]


@EACH_REQUEST
def test_a_request_is_answered_503_while_redis_is_down(outage: Outage, api_request: ApiRequest) -> None:
    assert_unavailable(outage.short_cache[api_request.name])


@EACH_REQUEST
def test_a_request_that_passed_the_key_check_is_answered_503_while_redis_is_down(
    outage: Outage, api_request: ApiRequest
) -> None:
    assert_unavailable(outage.long_cache[api_request.name])


@EACH_REQUEST
def test_a_repeated_request_succeeds_after_redis_is_back(outage: Outage, api_request: ApiRequest) -> None:
    assert outage.after[api_request.name].status == api_request.status_when_up, outage.after[api_request.name]


@EACH_POST
def test_a_post_with_an_idempotency_key_is_executed_once(outage: Outage, api_request: ApiRequest) -> None:
    repeated_posts = outage.repeated_posts[api_request.name]
    if api_request.name == "create a key":
        # The API returns a secret only once.
        assert (repeated_posts.status, repeated_posts.code) == (409, "CONFLICT")
    elif api_request.status_when_up < 300:
        assert (repeated_posts.text, repeated_posts.headers["idempotent-replayed"]) == (
            outage.after[api_request.name].text,
            "true",
        )


def test_each_requested_object_is_created_once(outage: Outage) -> None:
    assert {kind: len(made) for kind, made in outage.created.items()} == {
        "runs": 1,
        "batches": 1,
        "sessions": 1,
        "keys": 1,
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_flight_returns_its_result_once(outage: Outage, name: str) -> None:
    result = outage.calls[name]
    assert (result["status"], result["success"], result["output"]) == (200, True, "begun\nended\n"), result
    assert outage.executions[name] == 1


def test_a_repeated_call_is_answered_with_the_stored_response(outage: Outage) -> None:
    assert outage.repeated_call is not None
    assert (outage.repeated_call.status, outage.repeated_call.headers["idempotent-replayed"]) == (200, "true")
    assert json.loads(outage.repeated_call.text)["output"] == "begun\nended\n"


def test_a_call_sent_during_the_outage_is_refused_or_executed_once(outage: Outage) -> None:
    sent_reply = outage.sent_during_outage
    assert sent_reply is not None
    assert not [word for word in INTERNAL_TEXTS if word in sent_reply.text]
    executions = outage.executions["in-outage"]
    if sent_reply.status == 503:
        assert_unavailable(sent_reply)
        assert executions == 0
    else:
        reply = json.loads(sent_reply.text)
        assert (reply["success"], executions) == (True, 1) or (reply["error_code"], executions) == (
            "BROKER_UNAVAILABLE",
            0,
        ), reply


def test_a_call_sent_during_and_after_the_outage_is_executed_once(outage: Outage) -> None:
    assert outage.executions["call a tool"] == 1


def test_a_run_continues_to_its_answer_after_the_outage(outage: Outage) -> None:
    assert (outage.run["state"], outage.run["answer"]) == ("succeeded", f"{STEPS} steps"), outage.run


def test_a_run_event_stream_delivers_every_event_once(outage: Outage) -> None:
    got = [event for part in outage.followed_events for event in part]
    assert [event["id"] for event in got] == [event["id"] for event in outage.stored_events]
    assert got == outage.stored_events
    assert [event["event"] for event in got].count("RunEnded") == 1
    assert len([event for event in got if event["event"] == "CallFinished"]) == STEPS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reports_the_outage_in_plain_text(outage: Outage, page: str) -> None:
    reply = outage.pages[page]
    assert (reply.status, reply.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert "Redis does not answer" in reply.text
    assert reply.took_s < REPLY_LIMIT_S
    assert not [word for word in INTERNAL_TEXTS if word in reply.text]
    assert outage.pages_after[page].status == 200


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_request_with_an_invalid_key_gets_no_details_of_the_outage(outage: Outage, name: str) -> None:
    reply = outage.invalid_key_replies[name]
    if name == "unknown":
        assert (reply.status, reply.text) == (503, outage.invalid_key_replies["good"].text)
    else:
        assert reply.status == 401
    assert not [word for word in INTERNAL_TEXTS if word in reply.text]


def test_the_services_log_no_internal_error_during_the_outage(outage: Outage) -> None:
    assert "api_failed" not in outage.logs
    assert "Traceback" not in outage.logs
