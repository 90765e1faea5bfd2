"""Waiting for a call over a real Redis: deadlines, lost messages, and results stored outside the reply."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio
from pydantic import SecretStr

from tests.conftest import RedisProcess
from tests.support.records.builders import build_attempt
from tests.support.records.fakes import close_hub
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.envelope import decode_result, encode_result
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import blob_key, call_key, result_key, tenant_calls_key
from toolcrew.orchestrator.dispatch import celery_transport
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.orchestrator.dispatch.transport import CallLost, DeliveryFailed
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.call_records import CallState
from toolcrew.store.clock import SharedClock

QUEUE = "pool.web"


class Watch:
    """Records the calls that the transport asks it to monitor."""

    def __init__(self) -> None:
        self.watched_tasks: list[str] = []
        self.is_over = asyncio.Event()

    @contextlib.contextmanager
    def over(self, task_id: str, attempt: Attempt) -> Iterator[None]:
        self.watched_tasks.append(task_id)
        self.is_over.set()
        yield
        self.watched_tasks.remove(task_id)


@dataclass
class Harness:
    """A transport, and the Redis that its worker sees."""

    transport: CeleryTransport
    hub: ResultHub
    watch: Watch
    server: "redis.asyncio.Redis"

    async def next_task_id(self) -> str:
        """Return the task id of the next call in the queue."""
        reply: Any = await self.server.brpop([QUEUE], timeout=int(SOON_S))
        return str(json.loads(reply[1])["headers"]["id"])

    async def note(self, **fields: Any) -> None:
        await self.server.hset(call_key("default", "acme", "c1"), mapping=fields)

    async def state(self) -> str:
        reply: Any = await self.server.hget(call_key("default", "acme", "c1"), "state")
        return str(reply.decode())

    async def answer(self, task_id: str, result: Any, **stored: Any) -> None:
        text = json.dumps({"task_id": task_id, "status": "SUCCESS", "result": result, **stored})
        await self.server.set(result_key(task_id), text)
        await self.server.publish(result_key(task_id), text)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(celery_transport, "START_GRACE_S", 0.05)
    monkeypatch.setattr(celery_transport, "RESULT_RETRY_S", 0.02)


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    hub_client, worker_client = (redis.asyncio.Redis.from_url(redis_server.url) for _ in range(2))
    hub = ResultHub(hub_client)
    await hub.start()
    watch: Any = Watch()
    transport = CeleryTransport(BrokerSettings(redis_url=SecretStr(redis_server.url)), hub, watch, SharedClock())
    yield Harness(transport, hub, watch, worker_client)
    await transport.aclose()
    await close_hub(hub)
    await hub_client.aclose()
    await worker_client.aclose()


def attempt(*, start_in_s: float = 60.0, **fields: Any) -> Attempt:
    return build_attempt(**{"queue": QUEUE, "start_by": time.time() + start_in_s, "wait_s": SOON_S, **fields})


def start_delivery(harness: Harness, request: Attempt) -> "asyncio.Task[Any]":
    return asyncio.create_task(harness.transport.deliver(request))


def build_large_result(output: str = "x" * 100_000) -> tuple[Any, bytes]:
    records: list[bytes] = []

    def keep(data: bytes) -> str:
        records.append(data)
        return blob_key("default", "acme", "sandbox", "b1")

    return encode_result(ToolResult(call_id="c1", name="x", success=True, output=output), keep), records[0]


async def test_an_in_flight_call_id_is_refused_within_one_tenant_only(harness: Harness) -> None:
    delivery = start_delivery(harness, attempt())
    task_id = await harness.next_task_id()
    with pytest.raises(DeliveryFailed, match="in use by a call in flight"):
        await harness.transport.deliver(attempt())
    other_delivery = start_delivery(harness, attempt(tenant="other"))
    other_id = await harness.next_task_id()
    await harness.answer(other_id, "theirs")
    await harness.answer(task_id, "ours")
    assert [await delivery, await other_delivery] == ["ours", "theirs"]


async def test_a_late_result_of_an_earlier_attempt_is_dropped(harness: Harness) -> None:
    first = start_delivery(harness, attempt())
    lost_id = await harness.next_task_id()
    harness.hub.fail(lost_id, CallLost("gone", has_started=True))
    with pytest.raises(CallLost):
        await first
    await harness.note(state="queued", attempt=2)
    second = start_delivery(harness, attempt(number=2))
    task_id = await harness.next_task_id()
    await harness.answer(lost_id, "late")
    await harness.answer(task_id, "in time")
    assert await second == "in time"
    assert harness.hub.dropped == 1


async def test_a_call_not_started_by_its_deadline_is_forbidden(harness: Harness) -> None:
    with pytest.raises(DeliveryFailed, match="was not run") as failed:
        await harness.transport.deliver(attempt(start_in_s=0.0))
    assert failed.value.code is ErrorCode.TIMEOUT
    assert await harness.state() == CallState.FORBIDDEN


@pytest.mark.parametrize("state", ["running", "done", "lost", "unknown"])
async def test_a_call_started_by_its_deadline_is_awaited(harness: Harness, state: str) -> None:
    delivery = start_delivery(harness, attempt(start_in_s=0.3))
    task_id = await harness.next_task_id()
    await harness.note(state=state)
    finished, _ = await asyncio.wait({delivery}, timeout=0.6)
    assert not finished
    await harness.answer(task_id, "late, but there")
    assert await delivery == "late, but there"


async def test_a_forbidden_call_is_reported_as_cancelled(harness: Harness) -> None:
    delivery = start_delivery(harness, attempt(start_in_s=0.3))
    await harness.next_task_id()
    await harness.note(state="forbidden")
    with pytest.raises(DeliveryFailed, match="was cancelled") as failed:
        await asyncio.wait_for(delivery, SOON_S)
    assert failed.value.code is ErrorCode.CANCELLED


async def test_the_deadline_uses_the_shared_clock(redis_server: RedisProcess, harness: Harness) -> None:
    """A host whose clock is a minute behind neither rejects a call too early nor waits a minute too long."""
    behind = SharedClock(lambda: time.time() - 60)
    transport = CeleryTransport(BrokerSettings(redis_url=SecretStr(redis_server.url)), harness.hub, clock=behind)
    try:
        with pytest.raises(DeliveryFailed, match="was not run"):
            await asyncio.wait_for(transport.deliver(attempt(start_in_s=0.2)), SOON_S)
    finally:
        await transport.aclose()


async def test_the_deadline_is_checked_again_after_a_redis_outage(harness: Harness, redis_server: RedisProcess) -> None:
    delivery = start_delivery(harness, attempt(start_in_s=0.3))
    await harness.next_task_id()
    await asyncio.to_thread(redis_server.stop)
    await asyncio.sleep(0.5)
    assert not delivery.done()
    await asyncio.to_thread(redis_server.start)
    with pytest.raises(DeliveryFailed, match="was not run"):
        await asyncio.wait_for(delivery, SOON_S)


@pytest.mark.parametrize("keeps_result", [False, True])
async def test_a_large_result_is_fetched_and_deleted(harness: Harness, keeps_result: bool) -> None:
    encoded, record = build_large_result()
    delivery = start_delivery(harness, attempt(keeps_result=keeps_result))
    task_id = await harness.next_task_id()
    await harness.server.set(blob_key("default", "acme", "sandbox", "b1"), record)
    await harness.answer(task_id, encoded)
    assert decode_result(await delivery).output == "x" * 100_000
    keys = (blob_key("default", "acme", "sandbox", "b1"), result_key(task_id))
    if keeps_result:
        assert await harness.server.exists(*keys) == 2
        harness.transport.settle("acme", "c1")
    await wait_until_async(
        lambda: harness.server.exists(*keys), SOON_S, "blob and result are removed", 0.01, lambda count: count == 0
    )


@pytest.mark.parametrize(
    "key",
    [
        blob_key("default", "other", "sandbox", "b1"),
        blob_key("other", "acme", "sandbox", "b1"),
        "toolcrew:default:tenants",
        "host.a.b00t",
    ],
)
async def test_a_result_cannot_reference_a_blob_of_another_tenant(harness: Harness, key: str) -> None:
    """The aim: another tenant's bytes in one's own result, or the deletion of any key."""
    encoded, record = build_large_result()
    delivery = start_delivery(harness, attempt())
    task_id = await harness.next_task_id()
    await harness.server.set(key, record)
    await harness.answer(task_id, {**encoded, "kept": [[[key]]]})
    with pytest.raises(DeliveryFailed, match="record of another tenant") as failed:
        await delivery
    assert failed.value.code is ErrorCode.ENVELOPE_REFUSED
    await harness.hub.close()
    assert await harness.server.exists(key)


async def test_a_result_with_a_missing_blob_has_an_unknown_outcome(harness: Harness) -> None:
    encoded, _ = build_large_result()
    delivery = start_delivery(harness, attempt())
    await harness.answer(await harness.next_task_id(), encoded)
    with pytest.raises(DeliveryFailed, match="Redis lost its result") as failed:
        await delivery
    assert failed.value.code is ErrorCode.OUTCOME_UNKNOWN


async def test_a_finished_call_leaves_only_its_record_and_list_entry(harness: Harness) -> None:
    delivery = start_delivery(harness, attempt())
    await harness.answer(await harness.next_task_id(), "done")
    await delivery
    await harness.hub.close()
    keys = {
        call_key("default", "acme", "c1").encode(),
        tenant_calls_key("default", "acme").encode(),
        b"toolcrew:default:t:acme:memory",
    }
    assert set(await harness.server.keys()) == keys
