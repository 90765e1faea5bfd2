"""A call that is published in one pipeline with its request for a slot, on a real Redis."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.redis.admission_harness import DEPLOYMENT, QUEUE, build_request
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import slots_key
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.store.call_messages import CallAttempt, NotSent, Publisher
from toolcrew.store.clock import SharedClock
from toolcrew.store.scripts import ScriptConnection


class Orchestrator:
    """Admission and a publisher over one connection."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.scripts = ScriptConnection(client)
        # No test waits for the end of a lease: a slot becomes free only if it is released.
        self.admission = SharedAdmission(client, DEPLOYMENT, scripts=self.scripts, lease_s=600.0)
        self.publisher = Publisher(self.scripts, DEPLOYMENT, SharedClock())

    async def publish(self, call_id: str, slot: str) -> None:
        await self.publisher.publish(
            CallAttempt(
                tenant="acme", call_id=call_id, tool="bash_tool", queue=QUEUE, start_by=time.time() + 60, slot=slot
            ),
            "task",
            "{}",
        )

    async def aclose(self) -> None:
        await self.admission.aclose()
        await self.scripts.aclose()


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        await client.set(slots_key(DEPLOYMENT, QUEUE), 1)
        yield client


@pytest.fixture
async def ours(client: "redis.asyncio.Redis") -> AsyncIterator[Orchestrator]:
    opened = Orchestrator(client)
    yield opened
    await opened.aclose()


@pytest.fixture
async def other(client: "redis.asyncio.Redis") -> AsyncIterator[Orchestrator]:
    opened = Orchestrator(client)
    yield opened
    await opened.aclose()


async def test_a_call_with_a_free_slot_is_published_before_the_slot_is_known(
    ours: Orchestrator, client: "redis.asyncio.Redis"
) -> None:
    # A Redis without the admission script would otherwise run the publish before the script.
    async with ours.admission.slot(build_request()):
        pass
    async with ours.admission.slot(build_request(), is_early=True) as slot:
        assert slot.pending
        await ours.publish("c1", slot.pending)
        assert await client.llen(QUEUE) == 1  # type: ignore[misc]
        await asyncio.wait_for(slot.wait(), SOON_S)
        assert not slot.pending


async def test_a_call_without_a_slot_is_not_published_and_waits_for_one(
    ours: Orchestrator, other: Orchestrator, client: "redis.asyncio.Redis"
) -> None:
    async with other.admission.slot(build_request()), ours.admission.slot(build_request(), is_early=True) as slot:
        with pytest.raises(NotSent) as refused:
            await ours.publish("c1", slot.pending)
        assert refused.value.reason == "no_slot"
        assert await client.llen(QUEUE) == 0  # type: ignore[misc]
        # While a call of this orchestrator waits, the next call waits for its slot before its block begins.
        second = asyncio.create_task(hold_slot(ours))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(slot.wait(), second), 0.3)


async def hold_slot(orchestrator: Orchestrator) -> None:
    async with orchestrator.admission.slot(build_request(), is_early=True):
        pass


async def test_an_early_slot_that_was_not_used_is_released(ours: Orchestrator, client: "redis.asyncio.Redis") -> None:
    async with ours.admission.slot(build_request(), is_early=True):
        pass
    async with asyncio.timeout(SOON_S), ours.admission.slot(build_request()):
        pass


async def test_without_redis_the_call_is_reported_as_not_sent(ours: Orchestrator, redis_server: RedisProcess) -> None:
    async with ours.admission.slot(build_request()):
        pass
    await asyncio.to_thread(redis_server.stop)
    try:
        async with ours.admission.slot(build_request(), is_early=True) as slot:
            with pytest.raises(BrokerUnavailable, match="not sent"):
                await ours.publish("c1", slot.pending)
            with pytest.raises(BrokerUnavailable):
                await slot.wait()
    finally:
        await asyncio.to_thread(redis_server.start)
