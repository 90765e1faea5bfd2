"""A running call stays known as running, even if Redis has lost its claim. On a real Redis, with a clock that the
test advances.
"""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import build_call, build_context
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import call_key
from toolcrew.store.call_records import CallClaim, CallState, parse_record
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.clock import SharedClock
from toolcrew.workers import executor
from toolcrew.workers.executor import DURABLE_AFTER_S, UnconfirmedCalls

CALL, CONTEXT, HOLDER = (
    build_call("echo", call_id="c1"),
    build_context(deadline_at=time.time() + 86_400),
    "host.h1.b00t/w1",
)
KEY = call_key("d", "acme", "c1")


@pytest.fixture
def ledger(redis_server: RedisProcess) -> Iterator[WorkerCallStore]:
    with redis_server.client() as client:
        yield WorkerCallStore(client, "d", SharedClock())


class HeldCallHarness:
    """Held calls whose thread is the test. `confirmed` counts confirmations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.confirmed = 0
        self.is_away = False
        self.held = UnconfirmedCalls(lambda: self.now)
        monkeypatch.setattr(self.held, "_start", lambda: None)

    def confirm(self) -> None:
        self.confirmed += 1
        if self.is_away:
            raise BrokerUnavailable("Redis is away")

    def check_later(self) -> int:
        self.now += DURABLE_AFTER_S
        self.held.confirm_due()
        return self.confirmed


def test_a_long_call_is_confirmed_once_and_again_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = HeldCallHarness(monkeypatch)
    with harness.held.over(harness.confirm), harness.held.over(harness.confirm):
        harness.held.confirm_due()
        assert harness.confirmed == 0
        harness.is_away = True
        # The second call would only wait for the same time limit.
        assert harness.check_later() == 1
        harness.is_away = False
        assert [harness.check_later(), harness.check_later()] == [3, 3], "again after an outage, and then no more"


@pytest.mark.parametrize(
    "fields", [{"state": "queued", "attempt": 1, "queue": "host.h1.b00t"}, {}], ids=["claim lost", "call lost"]
)
def test_a_claim_lost_by_redis_is_stored_again(
    ledger: WorkerCallStore, redis_server: RedisProcess, fields: dict[str, str | int]
) -> None:
    with redis_server.client() as client:
        assert ledger.claim(CALL, CONTEXT, HOLDER) is CallClaim.GRANTED
        client.delete(KEY)
        if fields:
            client.hset(KEY, mapping=fields)  # type: ignore[arg-type]
        assert ledger.confirm(CALL, CONTEXT, HOLDER) is CallClaim.GRANTED
        record = parse_record(client.hgetall(KEY))  # type: ignore[arg-type]
    assert record is not None
    assert (record.state, record.holder, record.tool, record.session) == (CallState.RUNNING, HOLDER, "echo", "s1")
    assert not ledger.forbid("acme", "c1")
    assert ledger.claim(CALL, CONTEXT, "host.h2.b00t/w2") is CallClaim.STARTED


@pytest.mark.parametrize(
    ("state", "attempt", "expected"),
    [(state, 1, CallClaim.STARTED) for state in CallState if state is not CallState.QUEUED]
    + [(CallState.QUEUED, 2, CallClaim.SUPERSEDED)],
)
def test_a_confirmation_does_not_override_a_later_state(
    ledger: WorkerCallStore, redis_server: RedisProcess, state: CallState, attempt: int, expected: CallClaim
) -> None:
    with redis_server.client() as client:
        fields = {"state": state.value, "attempt": attempt, "holder": "another"}
        client.hset(KEY, mapping=fields)  # type: ignore[arg-type]
        assert ledger.confirm(CALL, CONTEXT, HOLDER) is expected
        record = parse_record(client.hgetall(KEY))  # type: ignore[arg-type]
    assert record is not None
    assert (record.state, record.attempt, record.holder) == (state, attempt, "another")


def test_the_confirmation_thread_ends_with_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "DURABLE_AFTER_S", 0.0)
    monkeypatch.setattr(executor, "CHECK_INTERVAL_S", 0.01)
    held = UnconfirmedCalls()
    for _ in range(2):
        sure, threads = threading.Event(), threading.active_count()
        with held.over(sure.set):
            assert sure.wait(20)
        wait_until(lambda most=threads: threading.active_count() <= most, SOON_S, "the thread ends", 0.01)
