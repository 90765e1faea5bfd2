"""The worker's ledger on a real Redis: a call starts once, whatever a queue repeats and whatever Redis loses."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S
from contract.errors import BrokerUnavailable
from contract.names import call_key, location_key
from store.calls import CALL_TTL_S, CallClaim, CallRecord, CallState, WorkerCallStore, parse_record
from store.connection import SharedClock
from tests.builders import build_call, build_context
from tests.conftest import RedisProcess

HOLDER = "host.h1.b00t/w1"
CALL = build_call("echo", call_id="c1")
STATES = [*CallState, None]


class Book:
    """A ledger and its storage."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client
        self.clock = SharedClock()
        self.ledger = WorkerCallStore(client, "d", self.clock)

    def write(self, state: CallState | None, attempt: int = 1, **fields: Any) -> None:
        self.client.delete(call_key("d", "acme", "c1"))
        if state is not None:
            self.client.hset(call_key("d", "acme", "c1"), mapping={"state": state, "attempt": attempt, **fields})

    def place(self, fence: int, state: str = "open") -> None:
        self.client.hset(
            location_key("d", "acme", "s1"), mapping={"state": state, "fence": fence, "queue": "host.h1.b00t"}
        )

    def read(self) -> CallRecord | None:
        return parse_record(self.client.hgetall(call_key("d", "acme", "c1")))  # type: ignore[arg-type]

    def claim(self, **context: Any) -> CallClaim:
        return self.ledger.claim(CALL, build_context(**context), HOLDER)


@pytest.fixture
def book(redis_server: RedisProcess) -> Iterator[Book]:
    with redis_server.client() as client:
        yield Book(client)


def test_a_call_that_was_sent_starts_once_and_says_where(book: Book) -> None:
    book.write(CallState.QUEUED, queue="host.h1.b00t", queued_at=1.5)
    assert [book.claim(), book.claim()] == [CallClaim.GRANTED, CallClaim.STARTED]
    record = book.read()
    assert record is not None
    assert record.state == CallState.RUNNING
    assert record.holder == HOLDER
    assert record.queue == "host.h1.b00t"
    assert record.tool == "echo"
    assert record.session == "s1"
    assert record.started_at == pytest.approx(time.time(), abs=5)


def test_the_record_of_a_running_call_outlives_its_limit(book: Book) -> None:
    key = call_key("d", "acme", "c1")
    assert book.claim(timeout_s=LONGEST_TIMEOUT_S) is CallClaim.GRANTED
    assert book.client.ttl(key) > CALL_TTL_S + LONGEST_TIMEOUT_S - MAX_TIMEOUT_S - 30
    book.write(CallState.QUEUED)
    book.ledger.confirm(CALL, build_context(timeout_s=LONGEST_TIMEOUT_S), HOLDER)
    assert book.client.ttl(key) > CALL_TTL_S + LONGEST_TIMEOUT_S - MAX_TIMEOUT_S - 30


def test_one_id_of_two_tenants_or_two_deployments_is_two_calls(book: Book) -> None:
    assert [book.claim(), book.claim(tenant="rival")] == [CallClaim.GRANTED, CallClaim.GRANTED]
    assert (
        WorkerCallStore(book.client, "other", SharedClock()).claim(CALL, build_context(), HOLDER) is CallClaim.GRANTED
    )


EXPECTED = {
    # state of the record: verdict for a message of the same attempt, of the next one, of the one before
    None: (CallClaim.GRANTED, CallClaim.GRANTED, CallClaim.GRANTED),
    CallState.QUEUED: (CallClaim.GRANTED, CallClaim.GRANTED, CallClaim.SUPERSEDED),
    CallState.RUNNING: (CallClaim.STARTED, CallClaim.STARTED, CallClaim.SUPERSEDED),
    CallState.DONE: (CallClaim.STARTED, CallClaim.STARTED, CallClaim.SUPERSEDED),
    CallState.LOST: (CallClaim.STARTED, CallClaim.GRANTED, CallClaim.SUPERSEDED),
    CallState.UNKNOWN: (CallClaim.STARTED, CallClaim.STARTED, CallClaim.SUPERSEDED),
    CallState.FORBIDDEN: (CallClaim.STARTED, CallClaim.STARTED, CallClaim.SUPERSEDED),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", ["claim", "refuse"])
def test_the_table_of_cases_holds_for_starting_and_for_refusing(book: Book, state: CallState | None, verb: str) -> None:
    for attempt, expected in zip((2, 3, 1), EXPECTED[state], strict=True):
        book.write(state, attempt=2)
        context = build_context(attempt=attempt)
        verdict = (
            book.ledger.claim(CALL, context, HOLDER) if verb == "claim" else book.ledger.refuse(CALL, context, HOLDER)
        )
        assert verdict is expected
        record = book.read()
        if expected is CallClaim.GRANTED:
            assert record is not None
            assert record.state == (CallState.RUNNING if verb == "claim" else CallState.FORBIDDEN)
            assert record.attempt == attempt
        elif record is not None:
            assert (record.state, record.attempt) == (state, 2)


def test_a_worker_takes_back_its_own_claim_of_a_call_that_it_refuses(book: Book) -> None:
    book.write(CallState.QUEUED)
    assert book.claim() is CallClaim.GRANTED
    assert book.ledger.refuse(CALL, build_context(), "host.h2.b00t/w2") is CallClaim.STARTED
    assert book.ledger.refuse(CALL, build_context(), HOLDER) is CallClaim.GRANTED
    record = book.read()
    assert record is not None
    assert (record.state, record.holder, record.started_at) == (CallState.FORBIDDEN, "", 0.0)
    assert book.claim() is CallClaim.STARTED


def test_a_call_past_its_deadline_is_forbidden_by_the_clock_of_redis(book: Book) -> None:
    book.write(CallState.QUEUED)
    assert book.claim(deadline_at=time.time() - 5) is CallClaim.EXPIRED
    record = book.read()
    assert record is not None
    assert record.state is CallState.FORBIDDEN
    assert book.claim() is CallClaim.STARTED


def test_a_late_repetition_is_not_an_answer(book: Book) -> None:
    """The attacker's aim: repeat a message once it is late, so that its sender reads that nothing ran while it runs."""
    assert book.claim() is CallClaim.GRANTED
    assert book.claim(deadline_at=time.time() - 5) is CallClaim.STARTED


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_a_host_whose_clock_is_a_minute_wrong_learns_the_time_with_its_first_claim(book: Book, skew_s: float) -> None:
    clock = SharedClock(lambda: time.time() + skew_s)
    ledger = WorkerCallStore(book.client, "d", clock)
    assert ledger.claim(CALL, build_context(deadline_at=time.time() + 30), HOLDER) is CallClaim.GRANTED
    assert clock() == pytest.approx(time.time(), abs=5)


# Places


@pytest.mark.parametrize(
    ("state", "fence", "name", "verdict"),
    [
        ("open", 3, "echo", CallClaim.GRANTED),
        ("open", 4, "echo", CallClaim.MOVED),
        ("open", 2, "echo", CallClaim.MOVED),
        ("moving", 3, "echo", CallClaim.MOVED),
        ("moving", 3, "session.open", CallClaim.GRANTED),
        ("moving", 4, "session.open", CallClaim.MOVED),
        (None, 3, "echo", CallClaim.MOVED),
    ],
)
def test_a_call_starts_at_its_session(book: Book, state: str | None, fence: int, name: str, verdict: CallClaim) -> None:
    book.write(CallState.QUEUED)
    if state is not None:
        book.place(fence, state)
    assert book.ledger.claim(build_call(name, call_id="c1"), build_context(fence=3), HOLDER) is verdict
    record = book.read()
    assert record is not None
    assert record.state is (CallState.RUNNING if verdict is CallClaim.GRANTED else CallState.QUEUED)


def test_what_has_started_is_a_repetition_wherever_its_session_lives_by_now(book: Book) -> None:
    book.place(3)
    assert book.claim(fence=3) is CallClaim.GRANTED
    book.place(4)
    assert book.claim(fence=3) is CallClaim.STARTED


# Records


def test_records_do_not_stay_for_ever(book: Book) -> None:
    key = call_key("d", "acme", "c1")
    for note in (
        lambda: book.claim(),
        lambda: book.ledger.refuse(CALL, build_context(), HOLDER),
        lambda: book.ledger.forbid("acme", "c1"),
    ):
        book.client.delete(key)
        note()
        assert 0 < book.client.ttl(key) <= CALL_TTL_S


# Cancels


@pytest.mark.parametrize("state", STATES)
def test_a_cancel_is_in_time_until_the_call_starts(book: Book, state: CallState | None) -> None:
    book.write(state, attempt=2)
    in_time = state in (None, CallState.QUEUED, CallState.FORBIDDEN)
    assert book.ledger.forbid("acme", "c1") is in_time
    if in_time:
        assert book.claim(attempt=2 if state else 1) is CallClaim.STARTED


def test_who_runs_a_call_is_known_while_it_runs(book: Book) -> None:
    assert book.ledger.holder("acme", "c1") is None
    book.claim()
    assert book.ledger.holder("acme", "c1") == HOLDER
    book.write(CallState.DONE, holder=HOLDER)
    assert book.ledger.holder("acme", "c1") is None


# A Redis that fails


def test_a_claim_a_refusal_or_a_lateness_whose_answer_was_lost_is_reported_all_the_same(book: Book) -> None:
    """The client library sends a command again when the connection broke: the first one may have been carried out.
    Otherwise no reply would arrive, and the caller would see a cancellation that never happened.
    """

    def twice(script: Any) -> Any:
        def send(*, keys: list[str], args: list[Any], **_: Any) -> Any:
            script(keys=keys, args=args)
            return script(keys=keys, args=args)

        return send

    book.ledger._refuse, book.ledger._claim = twice(book.ledger._refuse), twice(book.ledger._claim)
    assert [book.ledger.refuse(CALL, build_context(), HOLDER), book.ledger.refuse(CALL, build_context(), HOLDER)] == [
        CallClaim.GRANTED,
        CallClaim.STARTED,
    ]
    book.write(CallState.QUEUED)
    assert [book.claim(deadline_at=time.time() - 5), book.claim()] == [CallClaim.EXPIRED, CallClaim.STARTED]
    book.write(None)
    assert [book.claim(), book.claim()] == [CallClaim.GRANTED, CallClaim.STARTED]


def test_an_interrupt_while_redis_decides_leaves_no_answer_for_the_next_claim(book: Book) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        book.ledger.claim(CALL, build_context(), HOLDER, interrupt)
    assert book.claim(attempt=2) is CallClaim.STARTED
    assert book.claim(tenant="rival") is CallClaim.GRANTED


def test_a_redis_that_is_away_starts_nothing() -> None:
    dead = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    ledger = WorkerCallStore(dead, "d", SharedClock())
    with pytest.raises(BrokerUnavailable, match="was not run"):
        ledger.claim(CALL, build_context(), HOLDER)
    with pytest.raises(BrokerUnavailable):
        ledger.forbid("acme", "c1")


def test_a_record_that_is_none_of_ours_starts_nothing(book: Book) -> None:
    """The attacker's aim: write nonsense into the ledger so that a call runs again."""
    for fields in (
        {"state": "queued", "attempt": "many"},
        {"state": "made up", "attempt": "1"},
        {"state": "", "attempt": "1"},
    ):
        book.client.delete(call_key("d", "acme", "c1"))
        book.client.hset(call_key("d", "acme", "c1"), mapping=fields)
        assert book.claim() is not CallClaim.GRANTED
    book.client.set(call_key("d", "acme", "c1"), "a text")
    with pytest.raises(BrokerUnavailable):
        book.claim()


# What Redis forgets: any sequence of sends, claims, renewals, ends, and of falling back to an earlier state

STEP = st.sampled_from(["claim", "claim old", "renew", "finish", "refuse", "forbid", "forget one"])


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=12))
def test_an_attempt_starts_at_most_once(redis_process: RedisProcess, steps: list[str]) -> None:
    with redis_process.client() as client:
        client.flushall()
        book = Book(client)
        book.write(CallState.QUEUED)
        attempt, starts = 1, []
        for step in steps:
            if step == "claim":
                starts += [attempt] if book.claim(attempt=attempt) is CallClaim.GRANTED else []
            elif step == "claim old" and attempt > 1:
                starts += [attempt - 1] if book.claim(attempt=attempt - 1) is CallClaim.GRANTED else []
            elif step == "renew":
                attempt += 1
                book.write(CallState.QUEUED, attempt=attempt)
            elif step == "forget one" and attempt > 1 and attempt not in starts:
                # The renewal is forgotten; what had started before is not. A repetition of a message that has started
                # is refused by the worker's transport.
                was_started = attempt - 1 in starts
                book.write(CallState.RUNNING if was_started else CallState.QUEUED, attempt=attempt - 1)
            elif step == "finish":
                book.write(CallState.DONE, attempt=attempt)
            elif step == "refuse":
                book.ledger.refuse(CALL, build_context(attempt=attempt), HOLDER)
            elif step == "forbid":
                book.ledger.forbid("acme", "c1")
        assert sorted(set(starts)) == sorted(starts)
