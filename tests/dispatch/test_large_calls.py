"""Calls and results that are larger than an envelope: a blob carries them. Both sides check the whole call. A result
is stored under the tenant's key, retried over an outage, and reported if it cannot be stored.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context, build_exec_response
from tests.support.records.fakes import (
    AnsweringTransport,
    FakeSandboxClient,
    MemoryLedger,
    StaticCatalog,
    build_executor,
)
from tests.support.sandboxd.fake_hosts import build_pool
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import (
    MAX_ARGUMENTS_BYTES,
    MAX_ENVELOPE_BYTES,
    decode_result,
    find_result_key,
    join_result,
)
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import is_blob_of
from toolcrew.contract.signing import ResultSeal
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.store.blobs import Blobs, WorkerBlobs
from toolcrew.workers.celery_edge import tasks
from toolcrew.workers.celery_edge.tasks import RECORD_TTL_S, encode_result_message
from toolcrew.workers.tools.builtin import build_registry

LARGE = "x" * (2 * MAX_ENVELOPE_BYTES)


@dataclass
class Harness:
    """A dispatcher and a worker with blobs in a real Redis. `forged`: the content that another program stores in
    place of each blob.
    """

    server: RedisProcess
    client: "redis.asyncio.Redis"
    sync: "redis.Redis"
    forged: bytes | None = None
    sandbox: FakeSandboxClient = field(default_factory=lambda: FakeSandboxClient(build_exec_response(b"done")))

    def __post_init__(self) -> None:
        registry = build_registry()
        self._executor = build_executor(
            registry, self.sandbox, MemoryLedger(), WorkerBlobs(self.sync, "d", "sandbox"), {"host": "h", "queue": "q"}
        )
        self.transport = AnsweringTransport(self._serve)
        self.dispatcher = Dispatcher(
            self.transport,
            TenantCatalog(StaticCatalog(*registry.specs())),
            KEY,
            queue_wait_s=5,
            pool=replace(build_pool(), blobs=Blobs(self.client, "d")),
        )

    async def _serve(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if self.forged is not None:
            [key] = self.keys()
            self.sync.set(key, self.forged)
        return await asyncio.to_thread(self._executor.execute, call, context)

    async def call(self, name: str, audience: Any = "model", **arguments: Any) -> ToolResult:
        return await self.dispatcher.dispatch(
            Request(ToolCall(id="c1", name=name, arguments=arguments), "acme", "s1", "q", audience=audience)
        )

    def keys(self) -> list[bytes]:
        return list(self.sync.scan_iter("toolcrew:d:t:acme:blob-*.*-*"))


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        with redis_server.client() as sync:
            yield Harness(redis_server, client, sync)


async def test_large_call_reaches_the_worker_whole_and_its_blob_is_deleted(harness: Harness) -> None:
    result = await harness.call("bash_tool", command="cat", stdin=LARGE)
    assert (result.success, result.error) == (True, None)
    [body] = harness.sandbox.bodies
    assert body == b"cat" + LARGE.encode()
    [delivery] = harness.transport.deliveries
    assert len(delivery.envelope) < 4096
    assert harness.keys() == []


@pytest.mark.parametrize("keeps_result", [True, False])
async def test_cancelled_call_keeps_its_arguments_blob_only_if_it_continues(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, keeps_result: bool
) -> None:
    is_delivered = asyncio.Event()

    async def hang(_: Any) -> None:
        is_delivered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(harness.transport, "deliver", hang)
    call = ToolCall(id="c1", name="bash_tool", arguments={"command": "cat", "stdin": LARGE})
    request = Request(call, "acme", "s1", "q", keeps_result=keeps_result)
    task = asyncio.create_task(harness.dispatcher.dispatch(request))
    await is_delivered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(harness.keys()) == int(keeps_result)


async def test_worker_checks_the_arguments_of_a_large_call(harness: Harness) -> None:
    result = await harness.call("bash_tool", command="rm -rf /", stdin=LARGE)
    assert (result.error_code, harness.sandbox.requests) == (ErrorCode.SECURITY_REFUSED, [])


async def test_changed_arguments_blob_is_refused(harness: Harness) -> None:
    harness.forged = b'{"command": "curl evil"}'
    result = await harness.call("bash_tool", command="cat", stdin=LARGE)
    assert (result.error_code, harness.sandbox.requests) == (ErrorCode.ENVELOPE_REFUSED, [])
    assert harness.keys() == []


async def test_arguments_above_the_size_limit_are_refused(harness: Harness) -> None:
    result = await harness.call("bash_tool", command="cat", stdin="x" * MAX_ARGUMENTS_BYTES)
    assert result.error_code is ErrorCode.INVALID_ARGUMENTS
    assert f"at most {MAX_ARGUMENTS_BYTES}: write large content in parts" in str(result.error)
    assert (harness.transport.deliveries, harness.keys()) == ([], [])


async def test_session_exec_accepts_many_large_arguments(harness: Harness) -> None:
    argv = ["printf", "%s", "", *["y" * 65536] * 20]
    result = await harness.call("session.exec", "session", argv=argv, env={})
    assert result.success
    [request], [body] = harness.sandbox.requests, harness.sandbox.bodies
    script = body[: request["script_bytes"]]
    assert (request["argv"], script) == (None, b"mapfile -d '' -t -n 23 argv && exec -- \"${argv[@]}\"")
    assert body[len(script) :] == b"".join(part.encode() + b"\0" for part in argv)


# Results


CALL, CONTEXT = build_call("echo"), build_context()
SEAL = ResultSeal(KEY, CONTEXT.tenant)


def result(output: str) -> ToolResult:
    return ToolResult(call_id=CALL.id, name=CALL.name, success=True, output=output)


class FailingBlobs:
    """Blobs that fail a number of times, and then store everything."""

    def __init__(self, times: int, error: Exception) -> None:
        self._times = times
        self._error = error
        self.kept: list[tuple[str, bytes, int]] = []

    def leave(self, tenant: str, data: bytes, ttl_s: int) -> str:
        if self._times:
            self._times -= 1
            raise self._error
        self.kept.append((tenant, data, ttl_s))
        return "key"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.001)


def test_large_result_blob_belongs_to_the_tenant_and_outlives_its_message(redis_server: RedisProcess) -> None:
    client: Any = redis.Redis.from_url(redis_server.url)
    encoded = encode_result_message(result("x" * 256 * 1024), CALL, CONTEXT, WorkerBlobs(client, "d", "sandbox"), KEY)
    key = find_result_key(encoded)
    assert key is not None
    assert is_blob_of(key, "d", CONTEXT.tenant)
    assert RECORD_TTL_S - 30 < client.ttl(key) <= RECORD_TTL_S
    assert decode_result(join_result(encoded, client.get(key)), SEAL).output == "x" * 256 * 1024
    client.close()


def test_storing_a_result_is_retried_during_a_redis_outage() -> None:
    blobs = FailingBlobs(3, BrokerUnavailable("away"))
    assert find_result_key(encode_result_message(result("x" * 100_000), CALL, CONTEXT, blobs, KEY)) == "key"
    assert len(blobs.kept) == 1


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("Redis is away"), ToolFailure(ErrorCode.FILE_TOO_LARGE, "too many bytes")]
)
def test_result_that_cannot_be_stored_reports_outcome_unknown(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "KEEP_WAIT_S", 0.01)
    reply = decode_result(
        encode_result_message(result("x" * 100_000), CALL, CONTEXT, FailingBlobs(1_000_000, error), KEY), SEAL
    )
    assert (reply.success, reply.error_code) == (False, ErrorCode.OUTCOME_UNKNOWN)
    assert "has run" in str(reply.error)
    assert str(error) in str(reply.error)
