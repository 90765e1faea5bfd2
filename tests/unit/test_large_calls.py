"""Calls that are larger than an envelope: a blob carries their arguments, and both sides check the whole call."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.envelope import MAX_ARGUMENTS_BYTES, MAX_ENVELOPE_BYTES
from contract.errors import ErrorCode
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.tenant_catalog import TenantCatalog
from store.blobs import Blobs, WorkerBlobs
from tests.builders import KEY, build_exec_response
from tests.conftest import RedisProcess
from tests.fake_hosts import build_pool
from tests.fakes import AnsweringTransport, FakeSandboxClient, MemoryLedger, StaticCatalog, build_executor
from workers.tools.builtin import build_registry

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


async def test_a_worker_gets_the_whole_of_a_large_call_and_redis_keeps_nothing(harness: Harness) -> None:
    result = await harness.call("bash_tool", command="cat", stdin=LARGE)
    assert (result.success, result.error) == (True, None)
    [body] = harness.sandbox.bodies
    assert body == b"cat" + LARGE.encode()
    [delivery] = harness.transport.deliveries
    assert len(delivery.envelope) < 4096
    assert harness.keys() == []


async def test_a_worker_checks_the_whole_of_a_large_call(harness: Harness) -> None:
    result = await harness.call("bash_tool", command="rm -rf /", stdin=LARGE)
    assert (result.error_code, harness.sandbox.requests) == (ErrorCode.SECURITY_REFUSED, [])


async def test_large_arguments_that_were_changed_in_redis_are_refused(harness: Harness) -> None:
    harness.forged = b'{"command": "curl evil"}'
    result = await harness.call("bash_tool", command="cat", stdin=LARGE)
    assert (result.error_code, harness.sandbox.requests) == (ErrorCode.ENVELOPE_REFUSED, [])
    assert harness.keys() == []


async def test_arguments_have_a_largest_size_and_the_error_says_what_to_do(harness: Harness) -> None:
    result = await harness.call("bash_tool", command="cat", stdin="x" * MAX_ARGUMENTS_BYTES)
    assert result.error_code is ErrorCode.INVALID_ARGUMENTS
    assert f"at most {MAX_ARGUMENTS_BYTES}: write large content in parts" in str(result.error)
    assert (harness.transport.deliveries, harness.keys()) == ([], [])


async def test_a_session_starts_programs_with_many_large_arguments(harness: Harness) -> None:
    argv = ["printf", "%s", "", *["y" * 65536] * 20]
    result = await harness.call("session.exec", "session", argv=argv, env={})
    assert result.success
    [request], [body] = harness.sandbox.requests, harness.sandbox.bodies
    script = body[: request["script_bytes"]]
    assert (request["argv"], script) == (None, b"mapfile -d '' -t -n 23 argv && exec -- \"${argv[@]}\"")
    assert body[len(script) :] == b"".join(part.encode() + b"\0" for part in argv)
