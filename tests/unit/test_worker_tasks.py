"""The Celery edge, the ledger and the blobs: only signed calls of the right task run, once, with the content of their
own tenant.
"""

import json
from typing import Any

import pytest
import redis
import redis.asyncio
from celery import Celery
from celery.exceptions import Ignore
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from contract.calls import ToolResult
from contract.envelope import decode_result, encode_call
from contract.errors import OPERATOR_CODES, EnvelopeRefused, ErrorCode, ToolFailure
from contract.names import task_name
from contract.registry import ToolRegistry
from contract.signing import ResultSeal
from store import blobs as blobs_module
from store.blobs import Blobs as OrchestratorBlobs
from store.blobs import WorkerBlobs
from store.metrics import RefusalCounter
from tests.builders import KEY, build_call, build_context, build_spec
from tests.conftest import RedisProcess
from tests.fakes import FakeSandboxClient, MemoryBlobs, MemoryLedger, build_executor
from workers.celery_edge.tasks import CallNotServed, register_tasks
from workers.executor import Executor
from workers.tools.base import Outcome, WorkerRegistry, WorkerTool
from workers.tools.builtin import build_registry


class Edge:
    """The tasks of a worker, called as Celery calls them."""

    def __init__(self) -> None:
        self.client = FakeSandboxClient()
        self.built = 0
        self.refused: list[str] = []
        self._app = Celery("test", broker="memory://", set_as_current=False)
        register_tasks(self._app, build_registry(), KEY, self._build, self.refused.append, "d")

    def _build(self) -> Executor:
        self.built += 1
        return build_executor(build_registry(), self.client, MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})

    def run(self, task: str, envelope: Any) -> ToolResult:
        return decode_result(
            json.loads(json.dumps(self._app.tasks[task].run(envelope=envelope).encoded)), ResultSeal(KEY, "acme")
        )

    def names(self) -> set[str]:
        return {name for name in self._app.tasks if not name.startswith("celery.")}


@pytest.fixture(scope="module")
def one_edge() -> Edge:
    """Share one edge between all tests, because registering takes a while."""
    edge = Edge()
    assert edge.names()
    return edge


@pytest.fixture
def edge(one_edge: Edge) -> Edge:
    one_edge.client.closed.clear()
    one_edge.refused.clear()
    return one_edge


def test_the_tasks_of_a_worker_are_its_own_apps_alone(edge: Edge) -> None:
    other = Celery("other", broker="memory://", set_as_current=False)
    assert edge.names() & set(other.tasks) == set()


def test_an_envelope_for_another_tool_than_its_task_is_refused(edge: Edge) -> None:
    with pytest.raises(EnvelopeRefused, match="another tool"):
        edge.run("tool.read_tool", encode_call(build_call("session.close"), build_context(), KEY))
    assert (edge.client.closed, edge.refused) == ([], ["wrong_task"])


@pytest.mark.parametrize("envelope", [None, 5, b"{}", {}, [], "", "{", "null", '{"v": 1}'], ids=repr)
def test_garbage_is_refused_and_nothing_runs(edge: Edge, envelope: Any) -> None:
    with pytest.raises(EnvelopeRefused):
        edge.run("session.close", envelope)
    assert edge.client.closed == []
    assert edge.refused in (["malformed"], ["version"])


def test_a_repetition_stores_no_result_and_is_counted(edge: Edge) -> None:
    envelope = encode_call(build_call("session.close", call_id="twice"), build_context(), KEY)
    edge.run("session.close", envelope)
    with capture_logs(), pytest.raises(Ignore):
        edge.run("session.close", envelope)
    assert (edge.client.closed, edge.refused) == (["acme:s1"], ["repeated"])


def build_failing_app(code: ErrorCode) -> Celery:
    """Return an app whose tool x fails with `code`."""

    def fail(arguments: dict[str, Any], bench: Any) -> Outcome:
        raise ToolFailure(code, "the words of a secret")

    registry: WorkerRegistry = ToolRegistry([WorkerTool(build_spec("x"), fail)])
    app = Celery("test", broker="memory://", set_as_current=False)

    def build() -> Executor:
        return build_executor(registry, FakeSandboxClient(), MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})

    register_tasks(app, registry, KEY, build, lambda _: None, "d")
    return app


@pytest.mark.parametrize("code", ErrorCode)
def test_a_task_fails_exactly_when_the_operator_must_act(code: ErrorCode) -> None:
    task = build_failing_app(code).tasks[task_name("x")]
    envelope = encode_call(build_call("x"), build_context(), KEY)
    if code not in OPERATOR_CODES:
        answer = task.run(envelope=envelope)
    else:
        with capture_logs(), pytest.raises(CallNotServed) as failed:
            task.run(envelope=envelope)
        assert (code in str(failed.value), "secret" in str(failed.value)) == (True, False)
        answer = failed.value.answer
    result = decode_result(json.loads(json.dumps(answer.encoded)), ResultSeal(KEY, "acme"))
    assert (result.error_code, result.error) == (code, "the words of a secret")


# Counts and blobs on a real Redis


def test_a_count_that_redis_does_not_take_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    dead = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    RefusalCounter(dead, "d").count("signature")
    assert ["refusal_not_counted" in record.getMessage() for record in caplog.records] == [True]


def test_a_blob_is_there_until_its_caller_deletes_it(redis_server: RedisProcess) -> None:
    """A call that is lost with its worker is sent again with the same content."""
    with redis_server.client() as client:
        blobs = WorkerBlobs(client, "d", "sandbox")
        key = blobs.leave("acme", b"\x00\xff")
        assert 0 < client.ttl(key) <= 600
        assert blobs.take("acme", key) == b"\x00\xff"
        assert blobs.take("acme", key) == b"\x00\xff"
        client.delete(key)
        with pytest.raises(ToolFailure) as failure:
            blobs.take("acme", key)
        assert failure.value.code is ErrorCode.OUTCOME_UNKNOWN


@pytest.mark.parametrize("kind", ["another tenant's", "another pool's", "no blob"])
def test_a_key_of_another_owner_is_refused_and_its_value_stays(redis_server: RedisProcess, kind: str) -> None:
    with redis_server.client() as client:
        blobs, web = WorkerBlobs(client, "d", "sandbox"), WorkerBlobs(client, "d", "web")
        client.set("toolcrew:d:catalog", "x")
        keys = {"another tenant's": blobs.leave("rival", b"x"), "another pool's": web.leave("acme", b"x")}
        with pytest.raises(ToolFailure) as refused:
            blobs.take("acme", keys.get(kind, "toolcrew:d:catalog"))
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
        assert blobs.take("rival", keys["another tenant's"]) == b"x"
        assert (client.get("toolcrew:d:catalog"), web.take("acme", keys["another pool's"])) == (b"x", b"x")


def test_a_blob_that_was_changed_in_redis_is_refused(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        blobs = WorkerBlobs(client, "d", "sandbox")
        key, other = blobs.leave("acme", b"content"), blobs.leave("acme", b"other")
        for forged in (b"hostile", b"", client.get(other)):
            client.set(key, forged)
            with pytest.raises(ToolFailure, match="another program has written to Redis") as refused:
                blobs.take("acme", key)
            assert refused.value.code is ErrorCode.ENVELOPE_REFUSED


async def test_a_result_s_blob_that_was_changed_in_redis_is_refused(redis_server: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        blobs = OrchestratorBlobs(client, "d")
        key = await blobs.leave("acme", b"content")
        await client.set(key, b"hostile")
        with pytest.raises(ToolFailure) as refused:
            await blobs.take("acme", key)
        assert refused.value.code is ErrorCode.ENVELOPE_REFUSED
        await client.set(key, b"content")
        assert await blobs.take("acme", key) == b"content"


def test_a_blob_has_a_largest_size(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "MAX_BLOB_BYTES", 10)
    with redis_server.client() as client:
        blobs = WorkerBlobs(client, "d", "sandbox")
        assert blobs.take("acme", blobs.leave("acme", bytes(10))) == bytes(10)
        with pytest.raises(ToolFailure) as refused:
            blobs.leave("acme", bytes(11))
        assert refused.value.code is ErrorCode.FILE_TOO_LARGE
