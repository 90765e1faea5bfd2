"""Redis is killed during all operations of HTTP API clients, and comes back. Each client gets an error in time, and
nothing is done twice.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.api_stack import open_api_stack
from tests.outage_requests import REQUESTS, Asked, Seen
from tests.outage_story import BAD_KEYS, CALLS, PAGES, RULES, STEPS, Outage, play_outage
from tests.stack import open_redis_server

pytestmark = pytest.mark.stack

ANSWERED_S = 10.0
WORDS = ("127.0.0.1", "a-test-password", "Traceback", "redis.exceptions", "Connection refused", 'File "')
"""Texts that only a log may contain: the address of Redis, and internal errors."""
EACH = pytest.mark.parametrize("asked", REQUESTS, ids=lambda asked: asked.name)
POSTS = pytest.mark.parametrize(
    "asked", [asked for asked in REQUESTS if asked.method == "POST"], ids=lambda asked: asked.name
)


@pytest.fixture(scope="module")
def outage(engine: APIClient) -> Iterator[Outage]:
    with open_redis_server() as server, open_api_stack(engine, server.url, RULES) as stack:
        yield asyncio.run(play_outage(stack, server))


def check_away(seen: Seen) -> None:
    """Fail unless the response reported in time that Redis is unavailable, without further details."""
    assert (seen.status, seen.code) == (503, "BROKER_UNAVAILABLE"), seen
    assert seen.took_s < ANSWERED_S
    assert int(seen.headers["retry-after"]) >= 1
    assert not [word for word in WORDS if word in seen.text]


@EACH
def test_a_request_reports_that_redis_does_not_answer(outage: Outage, asked: Asked) -> None:
    check_away(outage.shallow[asked.name])


@EACH
def test_a_request_that_gets_past_the_door_is_reported_the_same(outage: Outage, asked: Asked) -> None:
    check_away(outage.deep[asked.name])


@EACH
def test_the_same_request_is_done_when_redis_is_back(outage: Outage, asked: Asked) -> None:
    assert outage.after[asked.name].status == asked.done, outage.after[asked.name]


@POSTS
def test_a_request_with_a_word_is_done_once_however_often_it_was_sent(outage: Outage, asked: Asked) -> None:
    again = outage.again[asked.name]
    if asked.name == "make a key":
        # The API returns a secret only once.
        assert (again.status, again.code) == (409, "CONFLICT")
    elif asked.done < 300:
        assert (again.text, again.headers["idempotent-replayed"]) == (outage.after[asked.name].text, "true")


def test_of_what_was_to_be_made_there_is_one_each(outage: Outage) -> None:
    assert {kind: len(made) for kind, made in outage.owned.items()} == {
        "runs": 1,
        "batches": 1,
        "sessions": 1,
        "keys": 1,
    }


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_flight_gives_its_result_once(outage: Outage, name: str) -> None:
    result = outage.calls[name]
    assert (result["status"], result["success"], result["output"]) == (200, True, "begun\nended\n"), result
    assert outage.acted[name] == 1


def test_a_call_in_flight_that_is_sent_again_is_answered_from_memory(outage: Outage) -> None:
    assert outage.repeated is not None
    assert (outage.repeated.status, outage.repeated.headers["idempotent-replayed"]) == (200, "true")
    assert json.loads(outage.repeated.text)["output"] == "begun\nended\n"


def test_a_call_that_is_sent_into_the_outage_is_refused_or_waits_and_never_acts_twice(outage: Outage) -> None:
    seen = outage.sent_into
    assert seen is not None
    assert not [word for word in WORDS if word in seen.text]
    acted = outage.acted["into"]
    if seen.status == 503:
        check_away(seen)
        assert acted == 0
    else:
        reply = json.loads(seen.text)
        assert (reply["success"], acted) == (True, 1) or (reply["error_code"], acted) == ("BROKER_UNAVAILABLE", 0), (
            reply
        )


def test_a_call_that_was_asked_for_in_the_outage_and_after_it_acts_once(outage: Outage) -> None:
    assert outage.acted["call a tool"] == 1


def test_a_run_is_worked_to_its_answer(outage: Outage) -> None:
    assert (outage.run["state"], outage.run["answer"]) == ("succeeded", f"{STEPS} steps"), outage.run


def test_who_follows_a_run_gets_every_event_once(outage: Outage) -> None:
    got = [event for part in outage.followed for event in part]
    assert [event["id"] for event in got] == [event["id"] for event in outage.whole]
    assert got == outage.whole
    assert [event["event"] for event in got].count("RunEnded") == 1
    assert len([event for event in got if event["event"] == "CallFinished"]) == STEPS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_it_in_words(outage: Outage, page: str) -> None:
    seen = outage.pages[page]
    assert (seen.status, seen.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert "Redis does not answer" in seen.text
    assert seen.took_s < ANSWERED_S
    assert not [word for word in WORDS if word in seen.text]
    assert outage.pages_after[page].status == 200


@pytest.mark.parametrize("name", BAD_KEYS)
def test_who_has_no_key_learns_nothing(outage: Outage, name: str) -> None:
    seen = outage.strangers[name]
    if name == "unknown":
        assert (seen.status, seen.text) == (503, outage.strangers["good"].text)
    else:
        assert seen.status == 401
    assert not [word for word in WORDS if word in seen.text]


def test_the_services_went_on_and_none_of_it_was_a_fault_of_theirs(outage: Outage) -> None:
    assert "api_failed" not in outage.logs
    assert "Traceback" not in outage.logs
