"""Admission of paused tenants: no call of such a tenant starts, and no call is lost."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import admission_prefix, slots_key, tenants_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.store.slots import SlotRequest, WaitReason, find_reasons
from toolcrew.store.tenants import RedisTenants

QUEUE = "host.a.b1"


class Harness:
    """The slots of one queue, and a tenant acme that the test pauses."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.tenants = RedisTenants(client, "d", KEY)
        self.admission = SharedAdmission(client, "d")
        self.ran: list[str] = []
        self.may_end = asyncio.Event()
        self.has_slot = asyncio.Event()
        self._number = 0

    def start(self, tenant: str = "acme", *, wait_s: float = 60.0, is_urgent: bool = False) -> "asyncio.Task[None]":
        """Start a call. It keeps its slot until `may_end` is set."""
        self._number += 1
        policy = TenantPolicy(queued=60)
        call = f"c{self._number}"
        request = SlotRequest(tenant, policy, QUEUE, call, "bash_tool", "interactive", wait_s, 30.0, is_urgent)
        return asyncio.create_task(self._run(request))

    async def _run(self, request: SlotRequest) -> None:
        async with self.admission.slot(request) as slot:
            self.ran.append(request.tenant)
            self.has_slot.set()
            await self.may_end.wait()
            slot.used_s = 0.01

    async def reason(self, tenant: str = "acme") -> WaitReason:
        return (await find_reasons(self.client, "d", [(tenant, QUEUE)]))[tenant, QUEUE]

    async def until_waiting(self, count: int) -> None:
        """Return when so many calls wait."""

        async def is_reached() -> bool:
            return bool(await self.client.hlen(f"{admission_prefix('d')}waiting") == count)

        await wait_until_async(is_reached, SOON_S, f"see {count} waiting calls")


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
    opened = Harness(client)
    for tenant in ("acme", "bolt"):
        await opened.tenants.add(tenant, TenantPolicy())
    await client.set(slots_key("d", QUEUE), 4)
    yield opened
    await opened.admission.aclose()
    await client.aclose()


async def test_calls_of_a_paused_tenant_wait_and_run_when_the_tenant_is_resumed(harness: Harness) -> None:
    await harness.tenants.pause("acme")
    harness.may_end.set()
    calls = [harness.start() for _ in range(50)]
    await asyncio.wait_for(harness.start("bolt"), SOON_S)
    assert (set(harness.ran), await harness.reason()) == ({"bolt"}, WaitReason.PAUSED)
    await harness.tenants.resume("acme")
    await asyncio.wait_for(asyncio.gather(*calls), SOON_S)
    assert harness.ran.count("acme") == 50


async def test_a_call_that_waits_while_its_tenant_is_paused_gets_no_slot_that_becomes_free(harness: Harness) -> None:
    await harness.client.set(slots_key("d", QUEUE), 1)
    running = harness.start("bolt")
    await asyncio.wait_for(harness.has_slot.wait(), SOON_S)
    call, last = harness.start(), harness.start("bolt")
    await harness.until_waiting(2)
    await harness.tenants.pause("acme")
    harness.may_end.set()
    await asyncio.wait_for(asyncio.gather(running, last), SOON_S)
    assert (call.done(), harness.ran.count("acme"), await harness.reason()) == (False, 0, WaitReason.PAUSED)
    await harness.tenants.resume("acme")
    await asyncio.wait_for(call, SOON_S)


async def test_a_call_that_waits_past_its_limit_names_the_pause(harness: Harness) -> None:
    await harness.tenants.pause("acme")
    with pytest.raises(ToolFailure, match=r"tenant acme is paused.*toolcrew tenants resume acme") as refused:
        await harness.start(wait_s=0.1)
    assert (refused.value.code, refused.value.metadata["not_run"]) == (ErrorCode.RATE_LIMITED, "admission")
    assert isinstance(refused.value.metadata["retry_after_s"], float)
    assert harness.ran == []
    await harness.until_waiting(0)


async def test_an_urgent_call_of_a_paused_tenant_runs(harness: Harness) -> None:
    await harness.tenants.pause("acme")
    harness.may_end.set()
    await asyncio.wait_for(harness.start(is_urgent=True), SOON_S)
    assert harness.ran == ["acme"]


async def test_the_paused_default_policy_holds_unregistered_tenants_only(harness: Harness) -> None:
    """A deployment with registered tenants serves no other name, and its default policy pauses none of them."""
    await harness.client.delete(tenants_key("d"))
    await harness.tenants.pause("default")
    assert await harness.reason("any") is WaitReason.PAUSED
    await harness.tenants.add("acme", TenantPolicy())
    assert await harness.reason() is not WaitReason.PAUSED


async def test_a_call_of_a_paused_tenant_is_refused_when_too_many_wait(harness: Harness) -> None:
    await harness.tenants.pause("acme")
    calls = [harness.start() for _ in range(60)]
    await harness.until_waiting(60)
    with pytest.raises(ToolFailure, match="60 calls of tenant acme already wait"):
        await asyncio.wait_for(harness.start(), SOON_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_call_continues_when_its_paused_tenant_is_removed(harness: Harness) -> None:
    """Its worker knows no such tenant, and refuses the call."""
    await harness.tenants.pause("acme")
    harness.may_end.set()
    call = harness.start()
    await harness.until_waiting(1)
    await harness.tenants.remove("acme")
    await asyncio.wait_for(call, SOON_S)
