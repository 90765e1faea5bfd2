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

from tests.conftest import RedisProcess
from tests.support.records.builders import build_call, build_context
from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import call_key, location_key
from toolcrew.store.call_records import CALL_TTL_S, CallClaim, CallRecord, CallState, parse_record
from toolcrew.store.call_scripts import REFUSE
from toolcrew.store.calls import FinishedCalls, WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.usage import CallEnding

HOLDER = "host.h1.b00t/w1"
CALL = build_call("echo", call_id="c1")
STATES = [*CallState, None]


class LedgerHarness:
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
def harness(redis_server: RedisProcess) -> Iterator[LedgerHarness]:
    with redis_server.client() as client:
        yield LedgerHarness(client)


def test_queued_call_starts_once_and_records_its_holder(harness: LedgerHarness) -> None:
    harness.write(CallState.QUEUED, queue="host.h1.b00t", queued_at=1.5)
    assert [harness.claim(), harness.claim()] == [CallClaim.GRANTED, CallClaim.STARTED]
    record = harness.read()
    assert record.state == CallState.RUNNING
    assert record.holder == HOLDER
    assert record.queue == "host.h1.b00t"
    assert record.tool == "echo"
    assert record.session == "s1"
    assert record.started_at == pytest.approx(time.time(), abs=5)


def test_record_of_a_running_call_outlives_its_timeout(harness: LedgerHarness) -> None:
    key = call_key("d", "acme", "c1")
    assert harness.claim(timeout_s=LONGEST_TIMEOUT_S) is CallClaim.GRANTED
    assert harness.client.ttl(key) > CALL_TTL_S + LONGEST_TIMEOUT_S - MAX_TIMEOUT_S - 30
    harness.write(CallState.QUEUED)
    harness.ledger.confirm(CALL, build_context(timeout_s=LONGEST_TIMEOUT_S), HOLDER)
    assert harness.client.ttl(key) > CALL_TTL_S + LONGEST_TIMEOUT_S - MAX_TIMEOUT_S - 30


def test_call_ids_are_separate_per_tenant_and_deployment(harness: LedgerHarness) -> None:
    assert [harness.claim(), harness.claim(tenant="rival")] == [CallClaim.GRANTED, CallClaim.GRANTED]
    assert (
        WorkerCallStore(harness.client, "other", SharedClock()).claim(CALL, build_context(), HOLDER)
        is CallClaim.GRANTED
    )


EXPECTED = {
    # state of the record: result for a message of the same attempt, of the next attempt, of the previous attempt
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
def test_claim_and_refuse_follow_the_state_table(harness: LedgerHarness, state: CallState | None, verb: str) -> None:
    for attempt, expected in zip((2, 3, 1), EXPECTED[state], strict=True):
        harness.write(state, attempt=2)
        context = build_context(attempt=attempt)
        act = harness.ledger.claim if verb == "claim" else harness.ledger.refuse
        assert act(CALL, context, HOLDER) is expected
        record = harness.read()
        if expected is CallClaim.GRANTED:
            assert record.state == (CallState.RUNNING if verb == "claim" else CallState.FORBIDDEN)
            assert record.attempt == attempt
        elif record is not None:
            assert (record.state, record.attempt) == (state, 2)


def test_worker_can_refuse_its_own_claimed_call(harness: LedgerHarness) -> None:
    harness.write(CallState.QUEUED)
    assert harness.claim() is CallClaim.GRANTED
    assert harness.ledger.refuse(CALL, build_context(), "host.h2.b00t/w2") is CallClaim.STARTED
    assert harness.ledger.refuse(CALL, build_context(), HOLDER) is CallClaim.GRANTED
    record = harness.read()
    assert (record.state, record.holder, record.started_at) == (CallState.FORBIDDEN, "", 0.0)
    assert harness.claim() is CallClaim.STARTED


def test_call_past_its_deadline_is_forbidden_by_the_redis_clock(harness: LedgerHarness) -> None:
    harness.write(CallState.QUEUED)
    assert harness.claim(deadline_at=time.time() - 5) is CallClaim.EXPIRED
    record = harness.read()
    assert record.state is CallState.FORBIDDEN
    assert harness.claim() is CallClaim.STARTED


def test_late_repetition_of_a_started_call_is_not_expired(harness: LedgerHarness) -> None:
    """The attacker's aim: repeat a message once it is late, so that its sender reads that nothing ran while it runs."""
    assert harness.claim() is CallClaim.GRANTED
    assert harness.claim(deadline_at=time.time() - 5) is CallClaim.STARTED


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_first_claim_corrects_a_wrong_host_clock(harness: LedgerHarness, skew_s: float) -> None:
    clock = SharedClock(lambda: time.time() + skew_s)
    ledger = WorkerCallStore(harness.client, "d", clock)
    assert ledger.claim(CALL, build_context(deadline_at=time.time() + 30), HOLDER) is CallClaim.GRANTED
    assert clock() == pytest.approx(time.time(), abs=5)


# Places


@pytest.mark.parametrize(
    ("state", "fence", "name", "expected"),
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
def test_call_starts_only_at_the_current_fence_of_its_session(
    harness: LedgerHarness, state: str | None, fence: int, name: str, expected: CallClaim
) -> None:
    harness.write(CallState.QUEUED)
    if state is not None:
        harness.place(fence, state)
    assert harness.ledger.claim(build_call(name, call_id="c1"), build_context(fence=3), HOLDER) is expected
    record = harness.read()
    assert record.state is (CallState.RUNNING if expected is CallClaim.GRANTED else CallState.QUEUED)


def test_started_call_stays_started_after_its_session_moves(harness: LedgerHarness) -> None:
    harness.place(3)
    assert harness.claim(fence=3) is CallClaim.GRANTED
    harness.place(4)
    assert harness.claim(fence=3) is CallClaim.STARTED


# Records


def test_call_records_expire(harness: LedgerHarness) -> None:
    key = call_key("d", "acme", "c1")
    for note in (
        lambda: harness.claim(),
        lambda: harness.ledger.refuse(CALL, build_context(), HOLDER),
        lambda: harness.ledger.forbid("acme", "c1"),
    ):
        harness.client.delete(key)
        note()
        assert 0 < harness.client.ttl(key) <= CALL_TTL_S


# Cancels


@pytest.mark.parametrize("state", STATES)
def test_forbid_succeeds_until_the_call_starts(harness: LedgerHarness, state: CallState | None) -> None:
    harness.write(state, attempt=2)
    in_time = state in (None, CallState.QUEUED, CallState.FORBIDDEN)
    assert harness.ledger.forbid("acme", "c1") is in_time
    if in_time:
        assert harness.claim(attempt=2 if state else 1) is CallClaim.STARTED


def test_holder_is_known_only_while_the_call_runs(harness: LedgerHarness) -> None:
    assert harness.ledger.holder("acme", "c1") is None
    harness.claim()
    assert harness.ledger.holder("acme", "c1") == HOLDER
    harness.write(CallState.DONE, holder=HOLDER)
    assert harness.ledger.holder("acme", "c1") is None


# A Redis that fails


def test_claim_or_refusal_with_a_lost_reply_is_reported_again(
    harness: LedgerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library sends a command again when the connection broke: the first one may have been carried out.
    Otherwise no reply would arrive, and the caller would see a cancellation that never happened.
    """

    def send_twice(target: object, name: str) -> None:
        run = getattr(target, name)

        def send(first: Any, **values: Any) -> Any:
            run(first, **values)
            return run(first, **values)

        monkeypatch.setattr(target, name, send)

    send_twice(REFUSE, "run_blocking")
    send_twice(harness.ledger._claim, "run")
    assert [
        harness.ledger.refuse(CALL, build_context(), HOLDER),
        harness.ledger.refuse(CALL, build_context(), HOLDER),
    ] == [
        CallClaim.GRANTED,
        CallClaim.STARTED,
    ]
    harness.write(CallState.QUEUED)
    assert [harness.claim(deadline_at=time.time() - 5), harness.claim()] == [CallClaim.EXPIRED, CallClaim.STARTED]
    harness.write(None)
    assert [harness.claim(), harness.claim()] == [CallClaim.GRANTED, CallClaim.STARTED]


def test_interrupted_claim_leaves_no_reply_for_the_next_claim(harness: LedgerHarness) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.ledger.claim(CALL, build_context(), HOLDER, interrupt)
    assert harness.claim(attempt=2) is CallClaim.STARTED
    assert harness.claim(tenant="rival") is CallClaim.GRANTED


def test_unreachable_redis_starts_no_call() -> None:
    unreachable = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    ledger = WorkerCallStore(unreachable, "d", SharedClock())
    with pytest.raises(BrokerUnavailable, match="was not run"):
        ledger.claim(CALL, build_context(), HOLDER)
    with pytest.raises(BrokerUnavailable):
        ledger.forbid("acme", "c1")


def test_invalid_call_record_starts_nothing(harness: LedgerHarness) -> None:
    """The attacker's aim: write nonsense into the ledger so that a call runs again."""
    for fields in (
        {"state": "queued", "attempt": "many"},
        {"state": "made up", "attempt": "1"},
        {"state": "", "attempt": "1"},
    ):
        harness.client.delete(call_key("d", "acme", "c1"))
        harness.client.hset(call_key("d", "acme", "c1"), mapping=fields)
        assert harness.claim() is not CallClaim.GRANTED
    harness.client.set(call_key("d", "acme", "c1"), "a text")
    with pytest.raises(BrokerUnavailable):
        harness.claim()


# What Redis forgets: any sequence of sends, claims, renewals, ends, and of falling back to an earlier state

STEP = st.sampled_from(["claim", "claim old", "renew", "finish", "refuse", "forbid", "forget one"])


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=12))
def test_attempt_starts_at_most_once(redis_process: RedisProcess, steps: list[str]) -> None:
    with redis_process.client() as client:
        client.flushall()
        harness = LedgerHarness(client)
        harness.write(CallState.QUEUED)
        attempt, starts = 1, []
        for step in steps:
            if step == "claim":
                starts += [attempt] if harness.claim(attempt=attempt) is CallClaim.GRANTED else []
            elif step == "claim old" and attempt > 1:
                starts += [attempt - 1] if harness.claim(attempt=attempt - 1) is CallClaim.GRANTED else []
            elif step == "renew":
                attempt += 1
                harness.write(CallState.QUEUED, attempt=attempt)
            elif step == "forget one" and attempt > 1 and attempt not in starts:
                # The renewal is forgotten; what had started before is not. A repetition of a message that has started
                # is refused by the worker's transport.
                was_started = attempt - 1 in starts
                harness.write(CallState.RUNNING if was_started else CallState.QUEUED, attempt=attempt - 1)
            elif step == "finish":
                harness.write(CallState.DONE, attempt=attempt)
            elif step == "refuse":
                harness.ledger.refuse(CALL, build_context(attempt=attempt), HOLDER)
            elif step == "forbid":
                harness.ledger.forbid("acme", "c1")
        assert sorted(set(starts)) == sorted(starts)


@pytest.mark.parametrize(
    ("fence", "state", "folder"),
    [(2, "open", b"/workspace/new"), (1, "open", None), (3, "open", None), (2, "moving", None), (2, "closed", None)],
)
def test_only_a_call_of_the_present_opening_records_the_folder(
    harness: LedgerHarness, fence: int, state: str, folder: bytes | None
) -> None:
    harness.place(2, state)
    assert harness.claim(fence=2 if state == "open" else None) is CallClaim.GRANTED
    ending = CallEnding(
        deployment="d", tenant="acme", call="c1", attempt=1, session="s1", folder="/workspace/new", fence=fence
    )
    assert FinishedCalls(harness.client).store("h-c1", "{}", 60, ending)
    assert harness.client.hget(location_key("d", "acme", "s1"), "folder") == folder
