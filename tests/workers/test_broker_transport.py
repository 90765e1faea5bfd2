"""The hardened transport and the delivery of results on a real Redis: nothing invalid runs, and no result is lost."""

import json
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from pydantic import SecretStr
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.stack.stack import ROOT
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.envelope import find_encoded_result
from toolcrew.contract.names import call_key, result_key
from toolcrew.store.call_records import CallRecord, CallState, parse_record
from toolcrew.store.calls import FinishedCalls
from toolcrew.store.usage import CallEnding
from toolcrew.workers.celery_edge.app import build_app, reserve_node_name
from toolcrew.workers.celery_edge.tasks import CallNotServed, TaskResult

QUEUE = "host.h1.b00t"


def build_message(**fields: Any) -> dict[str, Any]:
    properties = {
        "delivery_tag": secrets.token_hex(4),
        "delivery_info": {"exchange": "", "routing_key": QUEUE},
        "body_encoding": "base64",
    }
    plain = {
        "body": "e30=",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {},
        "properties": properties,
    }
    return {**plain, **fields}


def build_malformed_message(**fields: Any) -> bytes:
    message = build_message()
    message["properties"] = {**message["properties"], **fields}
    return json.dumps(message).encode()


MALFORMED_MESSAGES = [
    b"garbage",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"5",
    b"{}",
    b"[" * 100_000,
    b'{"body": "eA==", "properties": {}}',
    b'{"__type__": "uuid", "__value__": 5}',
    b'{"__type__": "base64", "__value__": 5}',
    b'{"__type__": [], "__value__": 5}',
    b'{"__type__": "decimal", "__value__": "x"}',
    build_malformed_message(delivery_tag=["t"]),
    build_malformed_message(delivery_info=None),
    build_malformed_message(delivery_info={"exchange": ""}),
    build_malformed_message(delivery_info={"exchange": "", "routing_key": []}),
    build_malformed_message(body_encoding="rot13"),
    build_malformed_message(body_encoding=["base64"]),
    json.dumps(build_message(body="not base64!\u00e9")).encode(),
    json.dumps(build_message(body=None)).encode(),
    json.dumps(build_message(headers=[1])).encode(),
    json.dumps(build_message(headers={"compression": "application/x-gzip"})).encode(),
    json.dumps(build_message(properties=[])).encode(),
    json.dumps(build_message(**{"content-type": "application/x-python-serialize"})).encode(),
]


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def app(redis_server: RedisProcess, refused: list[str]) -> Iterator[Celery]:
    app = build_app(BrokerSettings(redis_url=SecretStr(redis_server.url)), refused.append)
    yield app
    app.close()


class Reader:
    """Consumes the queue as a worker does. `take` is the worker's handling of a message."""

    def __init__(self, app: Celery, take: Callable[[Any], None] | None = None) -> None:
        self.taken: list[Any] = []
        self._take = take
        self.connection: Connection = app.connection_for_read()
        self._consumer = self.connection.Consumer([Queue(QUEUE)], on_message=self._on_message)
        self._consumer.consume()

    def _on_message(self, message: Any) -> None:
        if self._take is not None:
            self._take(message)
        message.ack()
        self.taken.append(message.headers)

    def read_one(self) -> Any:
        """Return the headers of the next message."""
        until = len(self.taken) + 1
        while len(self.taken) < until:
            self.connection.drain_events(timeout=10)
        return self.taken[-1]

    def close(self) -> None:
        self.connection.release()


def test_malformed_queue_message_is_dropped(app: Celery, redis_server: RedisProcess, refused: list[str]) -> None:
    reader = Reader(app)
    for number, malformed_message in enumerate(MALFORMED_MESSAGES, 1):
        with redis_server.client() as client, capture_logs() as logs:
            client.lpush(QUEUE, malformed_message)
            client.lpush(QUEUE, json.dumps(build_message(headers={"number": number})))
            assert reader.read_one() == {"number": number}, malformed_message[:60]
            assert (client.llen(QUEUE), client.hlen("unacked")) == (0, 0), malformed_message[:60]
        assert "queue_garbage" in [line["event"] for line in logs], malformed_message[:60]
        assert refused == ["malformed"] * number, malformed_message[:60]
    reader.close()


@pytest.mark.parametrize(
    "error", [KeyError("id"), TypeError("unhashable"), ValueError("x"), RuntimeError("x")], ids=repr
)
def test_message_that_raises_in_the_worker_is_rejected(
    app: Celery, redis_server: RedisProcess, error: Exception
) -> None:
    def raise_for_bad(message: Any) -> None:
        if "bad" in message.headers:
            raise error

    reader = Reader(app, raise_for_bad)
    with redis_server.client() as client, capture_logs() as logs:
        client.lpush(QUEUE, json.dumps(build_message(headers={"bad": 1})))
        client.lpush(QUEUE, json.dumps(build_message(headers={"number": 2})))
        assert reader.read_one() == {"number": 2}
        # No unacknowledged message remains that kombu would restore.
        assert (client.llen(QUEUE), client.hlen("unacked")) == (0, 0)
    reader.close()
    assert [line["event"] for line in logs] == ["message_refused"]


def test_lost_connection_is_not_treated_as_a_bad_message(app: Celery, redis_server: RedisProcess) -> None:
    def lose(_: Any) -> None:
        raise ConnectionError("gone")

    reader = Reader(app, lose)
    with redis_server.client() as client:
        client.lpush(QUEUE, json.dumps(build_message()))
        with pytest.raises(ConnectionError):
            reader.read_one()
    reader.close()


def test_delivered_message_is_not_recorded_as_unacknowledged(app: Celery, redis_server: RedisProcess) -> None:
    """Kombu's own book would give it to another worker later, when it has long been started."""
    reader = Reader(app)
    with redis_server.client() as client:
        client.lpush(QUEUE, json.dumps(build_message(headers={"number": 1})))
        reader.read_one()
        assert client.exists("unacked", "unacked_index") == 0
    reader.close()


def test_redelivered_message_is_dropped(app: Celery, redis_server: RedisProcess, refused: list[str]) -> None:
    """A Redis crash that loses the last second causes this case: the message is in the queue again while its call
    runs.
    """
    message = json.dumps(build_message(headers={"number": 1}))
    with redis_server.client() as client, capture_logs() as logs:
        for number in (1, 2):
            reader = Reader(app)
            client.lpush(QUEUE, message)
            client.lpush(QUEUE, json.dumps(build_message(headers={"number": 10 + number})))
            while reader.read_one() != {"number": 10 + number}:
                assert number == 1
            reader.close()
    assert [line["event"] for line in logs] == ["message_repeated"]
    assert refused == ["repeated"]


def test_messages_of_a_cancelled_queue_are_returned(app: Celery, redis_server: RedisProcess) -> None:
    reader = Reader(app)
    reader.connection.transport._callbacks.clear()
    with redis_server.client() as client:
        client.lpush(QUEUE, json.dumps(build_message(headers={"number": 1})))
        reader.connection.drain_events(timeout=10)
        assert (client.llen(QUEUE), client.hlen("unacked")) == (1, 0)
    reader.close()
    # A later connection of this worker reads the message, which is no repetition.
    reader = Reader(app)
    assert reader.read_one()["number"] == 1
    reader.close()


def test_node_names_are_unique_and_reused_after_a_worker_dies() -> None:
    """Flower merges workers of one name. A second process proves that the name of a dead worker is free."""
    broker, other = (
        BrokerSettings(redis_url=SecretStr(f"redis://:secret@localhost:6379/{number}")) for number in (7, 8)
    )
    machine = socket.gethostname()
    code = (
        "from toolcrew.contract.broker import BrokerSettings; from toolcrew.workers.celery_edge.app import reserve_node_name; "
        "print(reserve_node_name('web-x', BrokerSettings(redis_url='redis://:other@localhost:6379/7')), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as first:
        assert first.stdout.readline().strip() == f"web-x@{machine}"
        assert reserve_node_name("web-x", broker) == f"web-x-2@{machine}"
        assert reserve_node_name("web-x", other) == f"web-x@{machine}"
        first.kill()
    assert reserve_node_name("web-x", broker) == f"web-x@{machine}"


KEY = call_key("d", "acme", "c1")
ENCODED = {"v": 2, "call_id": "c1", "success": True, "data": [[{"output": "secret"}]]}


class Harness:
    """A worker's app that stores results through Celery, and the resulting contents of Redis."""

    def __init__(self, server: RedisProcess) -> None:
        self.app: Celery = build_app(BrokerSettings(redis_url=SecretStr(server.url)))
        self.client = server.client()

    def store(self, attempt: int = 1, *, has_run: bool = True, code: str = "") -> None:
        ending = (
            CallEnding(deployment="d", tenant="acme", call="c1", attempt=attempt, code=code, sandbox="c0ffee")
            if has_run
            else None
        )
        self.app.backend.mark_as_done("h-c1", TaskResult(ENCODED, ending), store_result=True)

    def write(self, state: CallState, attempt: int = 1) -> None:
        self.client.hset(KEY, mapping={"state": state, "attempt": attempt})

    def record(self) -> CallRecord:
        record = parse_record(self.client.hgetall(KEY))  # type: ignore[arg-type]
        assert record is not None
        return record

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


def test_result_is_stored_and_published_and_its_call_is_done(harness: Harness) -> None:
    harness.write(CallState.RUNNING)
    with harness.client.pubsub() as subscriber:
        subscriber.psubscribe("celery-task-meta-h*")
        assert subscriber.get_message(timeout=5)
        harness.store(code="TIMEOUT")
        message = subscriber.get_message(timeout=5)
    stored, record = harness.stored(), harness.record()
    assert (stored["status"], stored["result"], stored["task_id"]) == ("SUCCESS", ENCODED, "h-c1")
    assert json.loads(message["data"]) == stored
    assert (record.state, record.code, record.sandbox) == (CallState.DONE, "TIMEOUT", "c0ffee")
    assert record.ended_at > 0
    assert 0 < harness.client.ttl(result_key("h-c1")) <= 3600
    assert harness.client.ttl(KEY) > 3600


def test_infrastructure_failure_is_stored_as_failure_with_the_result(harness: Harness) -> None:
    harness.write(CallState.RUNNING)
    error = CallNotServed(
        "INTERNAL",
        "c1",
        TaskResult(ENCODED, CallEnding(deployment="d", tenant="acme", call="c1", attempt=1, code="INTERNAL")),
    )
    harness.app.backend.mark_as_failure("h-c1", error)
    stored, record = harness.stored(), harness.record()
    assert (stored["status"], stored["answer"]) == ("FAILURE", ENCODED)
    assert find_encoded_result(stored) == ENCODED
    assert (record.state, record.code) == (CallState.DONE, "INTERNAL")
    # Celery's own reader gets an exception that it can rebuild.
    assert "INTERNAL" in str(harness.app.AsyncResult("h-c1").result)


def test_pickled_exception_of_a_failed_call_omits_the_result() -> None:
    error = CallNotServed("INTERNAL", "c1", TaskResult(ENCODED, None))
    data = pickle.dumps(error)
    assert b"secret" not in data
    assert str(pickle.loads(data)) == str(error)


def test_result_of_a_superseded_attempt_is_not_stored(harness: Harness) -> None:
    """Otherwise the caller would take it for the answer of the attempt that is on its way."""
    harness.write(CallState.QUEUED, attempt=2)
    harness.store(attempt=1)
    record = harness.record()
    assert (harness.stored(), record.state, record.attempt) == (None, CallState.QUEUED, 2)


@pytest.mark.parametrize("state", [CallState.QUEUED, CallState.LOST, CallState.DONE, None])
def test_result_is_stored_when_redis_lost_the_call_record(harness: Harness, state: CallState | None) -> None:
    if state is not None:
        harness.write(state, attempt=1)
    harness.store(attempt=2)
    record = harness.record()
    assert (harness.stored()["result"], record.state, record.attempt) == (ENCODED, CallState.DONE, 2)


@pytest.mark.parametrize(
    ("state", "has_run"), [(CallState.QUEUED, False), (CallState.FORBIDDEN, False), (CallState.FORBIDDEN, True)]
)
def test_result_of_an_unrun_call_is_stored_and_its_record_unchanged(
    harness: Harness, state: CallState, has_run: bool
) -> None:
    harness.write(state)
    harness.store(has_run=has_run)
    record = harness.record()
    assert (harness.stored()["result"], record.state) == (ENCODED, state)


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE"])
def test_storing_a_result_is_retried_while_redis_is_down(
    harness: Harness, redis_server: RedisProcess, state: str
) -> None:
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
    ("refuse_writes", "repair"),
    [
        (lambda client: client.config_set("maxmemory", 1), lambda client: client.config_set("maxmemory", 0)),
        (lambda client: client.replicaof("127.0.0.1", 1), lambda client: client.replicaof("NO", "ONE")),
    ],
    ids=["full", "a replica"],
)
def test_storing_a_result_is_retried_while_redis_refuses_writes(
    harness: Harness, refuse_writes: Callable[["redis.Redis"], Any], repair: Callable[["redis.Redis"], Any]
) -> None:
    refuse_writes(harness.client)
    storing = threading.Thread(target=harness.store, daemon=True)
    try:
        storing.start()
        storing.join(0.3)
        assert storing.is_alive()
    finally:
        repair(harness.client)
    storing.join(20)
    assert harness.stored()["result"] == ENCODED


def test_result_that_cannot_be_stored_raises_no_exception(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread pool treats any exception here as its own end. The slot would be lost together with the result."""
    monkeypatch.setattr(harness.app.backend, "max_retries", 2)

    def refuse(*_: Any, **__: Any) -> Any:
        raise redis.ResponseError("READONLY You can't write against a read only replica.")

    monkeypatch.setattr(FinishedCalls, "store", refuse)
    with capture_logs() as logs:
        harness.store()
    assert [line["event"] for line in logs] == ["result_lost"]
