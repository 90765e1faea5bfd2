"""The delivery of results: stored, published and recorded as done in one step. Results of a repeated call are stored
for no caller, and no outage loses a result.
"""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from pydantic import SecretStr
from structlog.testing import capture_logs

from contract.envelope import stored_answer
from contract.names import call_key, result_key
from contract.settings import BrokerSettings
from store.calls import CallRecord, CallState, FinishedCalls, parse_record
from store.usage import CallEnding
from tests.conftest import RedisProcess
from workers.celery_edge.app import build_app
from workers.celery_edge.tasks import CallNotServed, TaskResult

KEY = call_key("d", "acme", "c1")
ENCODED = {"v": 2, "call_id": "c1", "success": True, "data": [[{"output": "secret"}]]}


class Harness:
    """A worker's app that stores results through Celery, and the resulting contents of Redis."""

    def __init__(self, server: RedisProcess) -> None:
        self.app: Celery = build_app(BrokerSettings(redis_url=SecretStr(server.url)))
        self.client = server.client()

    def store(self, attempt: int = 1, *, has_run: bool = True, code: str = "") -> None:
        ending = CallEnding("d", "acme", "c1", attempt, code, "c0ffee") if has_run else None
        self.app.backend.mark_as_done("h-c1", TaskResult(ENCODED, ending), store_result=True)

    def write(self, state: CallState, attempt: int = 1) -> None:
        self.client.hset(KEY, mapping={"state": state, "attempt": attempt})

    def record(self) -> CallRecord | None:
        return parse_record(self.client.hgetall(KEY))  # type: ignore[arg-type]

    def stored(self) -> Any:
        text: Any = self.client.get(result_key("h-c1"))
        return json.loads(text) if text else None

    def close(self) -> None:
        self.client.close()
        self.app.close()


@pytest.fixture
def harness(redis_server: RedisProcess) -> Iterator[Harness]:
    with capture_logs():
        opened = Harness(redis_server)
        yield opened
        opened.close()


def test_an_answer_is_stored_published_and_its_call_done(harness: Harness) -> None:
    harness.write(CallState.RUNNING)
    with harness.client.pubsub() as subscriber:
        subscriber.psubscribe("celery-task-meta-h*")
        assert subscriber.get_message(timeout=5)
        harness.store(code="TIMEOUT")
        message = subscriber.get_message(timeout=5)
    stored, record = harness.stored(), harness.record()
    assert (stored["status"], stored["result"], stored["task_id"]) == ("SUCCESS", ENCODED, "h-c1")
    assert message is not None
    assert json.loads(message["data"]) == stored
    assert record is not None
    assert (record.state, record.code, record.sandbox) == (CallState.DONE, "TIMEOUT", "c0ffee")
    assert record.ended_at > 0
    assert 0 < harness.client.ttl(result_key("h-c1")) <= 3600
    assert harness.client.ttl(KEY) > 3600


def test_a_failure_of_the_infrastructure_is_stored_as_failure_with_the_same_answer(harness: Harness) -> None:
    harness.write(CallState.RUNNING)
    error = CallNotServed("INTERNAL", "c1", TaskResult(ENCODED, CallEnding("d", "acme", "c1", 1, "INTERNAL")))
    harness.app.backend.mark_as_failure("h-c1", error)
    stored, record = harness.stored(), harness.record()
    assert (stored["status"], stored["answer"]) == ("FAILURE", ENCODED)
    assert stored_answer(stored) == ENCODED
    assert record is not None
    assert (record.state, record.code) == (CallState.DONE, "INTERNAL")
    # Celery's own reader gets an exception that it can rebuild.
    assert "INTERNAL" in str(harness.app.AsyncResult("h-c1").result)


def test_the_exception_of_a_failed_call_crosses_processes_without_the_answer() -> None:
    error = CallNotServed("INTERNAL", "c1", TaskResult(ENCODED, None))
    data = pickle.dumps(error)
    assert b"secret" not in data
    assert str(pickle.loads(data)) == str(error)


def test_the_answer_of_an_attempt_that_was_given_up_is_not_stored(harness: Harness) -> None:
    """Otherwise the caller would take it for the answer of the attempt that is on its way."""
    harness.write(CallState.QUEUED, attempt=2)
    harness.store(attempt=1)
    record = harness.record()
    assert record is not None
    assert (harness.stored(), record.state, record.attempt) == (None, CallState.QUEUED, 2)


@pytest.mark.parametrize("state", [CallState.QUEUED, CallState.LOST, CallState.DONE])
def test_a_result_is_stored_when_redis_lost_the_record(harness: Harness, state: CallState) -> None:
    harness.write(state, attempt=1)
    harness.store(attempt=2)
    record = harness.record()
    assert record is not None
    assert (harness.stored()["result"], record.state, record.attempt) == (ENCODED, CallState.DONE, 2)


@pytest.mark.parametrize(
    ("state", "has_run"), [(CallState.QUEUED, False), (CallState.FORBIDDEN, False), (CallState.FORBIDDEN, True)]
)
def test_a_call_that_was_not_run_is_answered_and_its_record_left(
    harness: Harness, state: CallState, has_run: bool
) -> None:
    harness.write(state)
    harness.store(has_run=has_run)
    record = harness.record()
    assert record is not None
    assert (harness.stored()["result"], record.state) == (ENCODED, state)


def test_a_call_that_redis_has_forgotten_is_done_all_the_same(harness: Harness) -> None:
    harness.store()
    record = harness.record()
    assert record is not None
    assert record.state is CallState.DONE


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE"])
def test_an_answer_outlives_a_redis_that_is_away(harness: Harness, redis_server: RedisProcess, state: str) -> None:
    harness.store()
    harness.client.flushall()
    redis_server.stop()
    storing = threading.Thread(
        target=harness.store
        if state == "SUCCESS"
        else lambda: harness.app.backend.mark_as_failure("h-c1", ValueError("x")),
        daemon=True,
    )
    storing.start()
    storing.join(0.5)
    assert storing.is_alive()
    redis_server.start()
    storing.join(20)
    assert harness.stored()["status"] == state


@pytest.mark.parametrize(
    ("spoil", "repair"),
    [
        (lambda client: client.config_set("maxmemory", 1), lambda client: client.config_set("maxmemory", 0)),
        (lambda client: client.replicaof("127.0.0.1", 1), lambda client: client.replicaof("NO", "ONE")),
    ],
    ids=["full", "a replica"],
)
def test_an_answer_outlives_a_redis_that_takes_no_writes(
    harness: Harness, spoil: Callable[["redis.Redis"], Any], repair: Callable[["redis.Redis"], Any]
) -> None:
    spoil(harness.client)
    storing = threading.Thread(target=harness.store, daemon=True)
    try:
        storing.start()
        storing.join(0.3)
        assert storing.is_alive()
    finally:
        repair(harness.client)
    storing.join(20)
    assert harness.stored()["result"] == ENCODED


def test_an_answer_that_redis_never_takes_costs_no_slot(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread pool treats any exception here as its own end. The slot would be lost together with the result."""
    monkeypatch.setattr(harness.app.backend, "max_retries", 2)

    def refuse(*_: Any, **__: Any) -> Any:
        raise redis.ResponseError("READONLY You can't write against a read only replica.")

    monkeypatch.setattr(FinishedCalls, "store", refuse)
    with capture_logs() as logs:
        harness.store()
    assert [line["event"] for line in logs] == ["result_lost"]
