"""The hardened transport on a real Redis: invalid data in a queue is dropped, and the next message arrives."""

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue
from pydantic import SecretStr
from structlog.testing import capture_logs

from contract.settings import BrokerSettings
from tests.conftest import RedisProcess
from tests.stack import ROOT
from workers.celery_edge.app import build_app, reserve_node_name

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


def broken(**fields: Any) -> bytes:
    message = build_message()
    message["properties"] = {**message["properties"], **fields}
    return json.dumps(message).encode()


GARBAGE = [
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
    broken(delivery_tag=["t"]),
    broken(delivery_info=None),
    broken(delivery_info={"exchange": ""}),
    broken(delivery_info={"exchange": "", "routing_key": []}),
    broken(body_encoding="rot13"),
    broken(body_encoding=["base64"]),
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


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda data: repr(data[:60]))
def test_garbage_is_dropped(app: Celery, redis_server: RedisProcess, refused: list[str], garbage: bytes) -> None:
    reader = Reader(app)
    with redis_server.client() as client, capture_logs() as logs:
        client.lpush(QUEUE, garbage)
        client.lpush(QUEUE, json.dumps(build_message(headers={"number": 2})))
        assert reader.read_one() == {"number": 2}
        assert (client.llen(QUEUE), client.hlen("unacked")) == (0, 0)
    reader.close()
    assert "queue_garbage" in [line["event"] for line in logs]
    assert refused == ["malformed"]


@pytest.mark.parametrize(
    "error", [KeyError("id"), TypeError("unhashable"), ValueError("x"), RuntimeError("x")], ids=repr
)
def test_an_unreadable_message_is_rejected(app: Celery, redis_server: RedisProcess, error: Exception) -> None:
    def choke(message: Any) -> None:
        if "bad" in message.headers:
            raise error

    reader = Reader(app, choke)
    with redis_server.client() as client, capture_logs() as logs:
        client.lpush(QUEUE, json.dumps(build_message(headers={"bad": 1})))
        client.lpush(QUEUE, json.dumps(build_message(headers={"number": 2})))
        assert reader.read_one() == {"number": 2}
        # No unacknowledged message remains that kombu would restore.
        assert (client.llen(QUEUE), client.hlen("unacked")) == (0, 0)
    reader.close()
    assert [line["event"] for line in logs] == ["message_refused"]


def test_a_connection_that_breaks_is_not_called_a_bad_message(app: Celery, redis_server: RedisProcess) -> None:
    def lose(_: Any) -> None:
        raise ConnectionError("gone")

    reader = Reader(app, lose)
    with redis_server.client() as client:
        client.lpush(QUEUE, json.dumps(build_message()))
        with pytest.raises(ConnectionError):
            reader.read_one()
    reader.close()


def test_a_message_reaches_only_its_reader(app: Celery, redis_server: RedisProcess) -> None:
    """Kombu's own book would give it to another worker later, when it has long been started."""
    reader = Reader(app)
    with redis_server.client() as client:
        client.lpush(QUEUE, json.dumps(build_message(headers={"number": 1})))
        reader.read_one()
        assert client.exists("unacked", "unacked_index") == 0
    reader.close()


def test_a_redelivered_message_is_dropped(app: Celery, redis_server: RedisProcess, refused: list[str]) -> None:
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


def test_two_workers_of_one_name_on_a_machine_have_two_names_and_a_free_one_is_taken_again() -> None:
    """Flower merges workers of one name. A second process proves that the name of a dead worker is free."""
    broker, other = (
        BrokerSettings(redis_url=SecretStr(f"redis://:secret@localhost:6379/{number}")) for number in (7, 8)
    )
    machine = socket.gethostname()
    code = (
        "from contract.settings import BrokerSettings; from workers.celery_edge.app import reserve_node_name; "
        "print(reserve_node_name('web-x', BrokerSettings(redis_url='redis://:other@localhost:6379/7')), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == f"web-x@{machine}"
        assert reserve_node_name("web-x", broker) == f"web-x-2@{machine}"
        assert reserve_node_name("web-x", other) == f"web-x@{machine}"
        first.kill()
    assert reserve_node_name("web-x", broker) == f"web-x@{machine}"
