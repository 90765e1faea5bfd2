"""Several orchestrators share slots over a real Redis: waits, abandoned requests, killed orchestrators, and a Redis
that stops and comes back.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from tests.conftest import RedisProcess
from tests.support.redis.admission_harness import DEPLOYMENT, QUEUE, build_request
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import admission_prefix, slots_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.admission import NOT_ADMITTED, SharedAdmission


class Harness:
    """Orchestrators of one deployment on one Redis."""

    def __init__(self, server: RedisProcess) -> None:
        self.server = server
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            server.url, max_connections=16, timeout=10, socket_timeout=10, retry=Retry(ExponentialBackoff(), 3)
        )
        self.client = redis.asyncio.Redis(connection_pool=pool)
        self.opened: list[SharedAdmission] = []

    async def set_slots(self, slots: int) -> None:
        await self.client.set(slots_key(DEPLOYMENT, QUEUE), slots)

    def open(self, lease_s: float = 20.0) -> SharedAdmission:
        self.opened.append(SharedAdmission(self.client, DEPLOYMENT, lease_s=lease_s))
        return self.opened[-1]

    async def count(self, kind: str) -> int:
        return int(await self.client.hlen(f"{admission_prefix(DEPLOYMENT)}{kind}"))

    async def until(
        self, is_true: Callable[[], bool], what: str | None = None, number: int | Callable[[], int] = 0
    ) -> None:
        """Wait until `is_true`, or until the number of `what` calls in Redis is right. Fails after 30 s."""
        wanted = number if callable(number) else lambda: number

        async def is_reached() -> bool:
            return is_true() and (what is None or await self.count(what) == wanted())

        await wait_until_async(is_reached, SOON_S, "see the condition", pause_s=0.02)


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    opened = Harness(redis_server)
    await opened.set_slots(4)
    yield opened
    for admission in opened.opened:
        await admission.aclose()
    await opened.client.aclose()


class Caller:
    """A call that holds its slot until the test ends the call."""

    def __init__(self, admission: SharedAdmission, **fields: object) -> None:
        self.has_slot = asyncio.Event()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, fields))

    async def _run(self, admission: SharedAdmission, fields: dict[str, object]) -> None:
        async with admission.slot(build_request(**fields)):  # type: ignore[arg-type]
            self.has_slot.set()
            await self.may_end.wait()

    async def end(self) -> None:
        self.may_end.set()
        await self.task


def count_done(tasks: "list[asyncio.Task[None]]") -> int:
    return sum(task.done() for task in tasks)


def count_holders(callers: list[Caller]) -> int:
    return sum(caller.has_slot.is_set() and not caller.task.done() for caller in callers)


async def drain(harness: Harness, callers: list[Caller], *, at_once: int) -> None:
    """End one call after the other. Each time another call gets the slot. The number of slots never exceeds the limit
    for very short calls.
    """
    while callers:
        ended = next(caller for caller in callers if caller.has_slot.is_set())
        callers.remove(ended)
        await ended.end()
        # One slot fewer: long calls of one tenant leave a slot to other tenants, and may be the only remaining calls.
        await harness.until(lambda: count_holders(callers) >= min(max(1, at_once - 1), len(callers)))
        assert await harness.count("held") <= max(at_once + 4, at_once * 2) + 1, (
            "the one that ended is given back in the background"
        )
    await harness.until(lambda: True, "held", 0)
    assert await harness.count("waiting") == 0


async def test_a_slot_released_by_one_orchestrator_goes_to_a_call_of_another(harness: Harness) -> None:
    await harness.set_slots(1)
    first = Caller(harness.open(lease_s=600.0))
    await first.has_slot.wait()
    second = Caller(harness.open(lease_s=600.0))
    await harness.until(lambda: True, "waiting", 1)
    await first.end()
    async with asyncio.timeout(SOON_S):
        await second.has_slot.wait()
    await second.end()
    await harness.until(lambda: True, "held", 0)


async def test_several_orchestrators_together_hold_at_most_all_slots(harness: Harness) -> None:
    callers = [
        Caller(admission, tenant=tenant)
        for admission in (harness.open(), harness.open())
        for tenant in "ab"
        for _ in range(10)
    ]
    await harness.until(lambda: count_holders(callers) == 4, "waiting", 36)
    await drain(harness, callers, at_once=4)


async def test_a_call_that_waits_too_long_is_refused_and_leaves_no_ticket(harness: Harness) -> None:
    await harness.set_slots(1)
    admission = harness.open()
    first = Caller(admission)
    await first.has_slot.wait()
    with pytest.raises(ToolFailure) as refused:
        async with admission.slot(build_request(wait_s=0.2)):
            raise AssertionError("there was no slot")
    assert refused.value.code == ErrorCode.RATE_LIMITED
    assert refused.value.metadata == {"retry_after_s": 1.0, **NOT_ADMITTED}
    await harness.until(lambda: True, "waiting", 0)
    await first.end()


async def test_a_call_above_the_limit_of_waiting_calls_is_refused_at_once(harness: Harness) -> None:
    await harness.set_slots(1)
    admission = harness.open()
    policy = TenantPolicy(queued=1)
    callers = [Caller(admission, policy=policy) for _ in range(2)]
    await harness.until(lambda: count_holders(callers) == 1, "waiting", 1)
    with pytest.raises(ToolFailure, match=r"1 call of tenant acme already waits.*try again in") as refused:
        async with admission.slot(build_request(policy=policy)):
            raise AssertionError("there was no slot")
    assert refused.value.code == ErrorCode.RATE_LIMITED
    assert isinstance(refused.value.metadata["retry_after_s"], float)
    assert NOT_ADMITTED.items() <= refused.value.metadata.items()
    for caller in callers:
        await caller.end()


async def test_a_cancelled_call_leaves_neither_ticket_nor_slot(harness: Harness) -> None:
    await harness.set_slots(1)
    admission = harness.open()
    callers = [Caller(admission) for _ in range(3)]
    await harness.until(lambda: count_holders(callers) == 1, "waiting", 2)
    for caller in callers:
        caller.task.cancel()
    await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)
    await harness.until(lambda: True, "waiting", 0)
    await harness.until(lambda: True, "held", 0)


async def test_calls_cancelled_while_a_slot_is_requested_or_granted_lose_no_slot(harness: Harness) -> None:
    """Cancel after 0, 1, 2... turns of the loop: before the request is sent, during its transfer, and just as the
    slot arrives.
    """
    admission, other = harness.open(), harness.open()
    for turns in range(60):
        callers = [Caller(one, wait_s=30.0) for one in (admission, other) for _ in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for caller in callers:
            caller.task.cancel()
        await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)
    await harness.until(lambda: True, "held", 0)
    await harness.until(lambda: True, "waiting", 0)


async def test_a_dead_orchestrator_frees_its_slots_and_waiting_calls(harness: Harness) -> None:
    await harness.set_slots(1)
    dead = harness.open(lease_s=1.0)
    of_the_dead = [Caller(dead) for _ in range(3)]
    await harness.until(lambda: count_holders(of_the_dead) == 1, "waiting", 2)
    for task in dead._tasks:
        task.cancel()
    harness.opened.remove(dead)
    dead._steps.close()
    await dead._scripts.aclose()  # a connection ends with its process
    heir = Caller(harness.open(lease_s=1.0), tenant="heir")
    async with asyncio.timeout(SOON_S):
        await heir.has_slot.wait()
    await heir.end()
    await harness.until(lambda: True, "waiting", 0)
    await harness.until(lambda: True, "held", 0)
    for caller in of_the_dead:
        caller.task.cancel()


async def test_leases_are_renewed_and_waiting_calls_keep_their_position(harness: Harness) -> None:
    await harness.set_slots(1)
    callers = [Caller(harness.open(lease_s=1.0)) for _ in range(2)]
    await harness.until(lambda: count_holders(callers) == 1, "waiting", 1)
    await asyncio.sleep(2.5)
    assert (await harness.count("held"), await harness.count("waiting")) == (1, 1)
    for caller in callers:
        caller.may_end.set()
    await asyncio.gather(*(caller.task for caller in callers))


async def test_a_call_finds_its_slot_when_the_grant_message_is_lost(harness: Harness) -> None:
    """The message of the grant does not reach the call."""
    await harness.set_slots(1)
    first = Caller(harness.open(lease_s=2.0))
    await first.has_slot.wait()
    deaf = harness.open(lease_s=2.0)
    second = Caller(deaf)
    await harness.until(lambda: True, "waiting", 1)
    deaf._tasks[1].cancel()
    await first.end()
    async with asyncio.timeout(SOON_S):
        await second.has_slot.wait()
    await second.end()


async def test_slots_and_waiting_calls_are_restored_after_redis_lost_its_data(harness: Harness) -> None:
    await harness.set_slots(1)
    callers = [Caller(harness.open(lease_s=1.0)) for _ in range(3)]
    await harness.until(lambda: count_holders(callers) == 1, "waiting", 2)
    await harness.client.flushall()
    await harness.set_slots(1)
    # A request that comes before the holder has learned of its slot also gets a slot.
    await harness.until(lambda: True, "waiting", lambda: 3 - max(1, count_holders(callers)))
    await drain(harness, callers, at_once=1)


async def test_a_redis_restart_neither_loses_nor_doubles_a_slot(harness: Harness) -> None:
    callers = [
        Caller(admission, tenant=tenant)
        for admission in (harness.open(), harness.open())
        for tenant in "ab"
        for _ in range(3)
    ]
    await harness.until(lambda: count_holders(callers) == 4, "waiting", 8)
    harness.server.stop()
    ended = next(caller for caller in callers if caller.has_slot.is_set())
    await ended.end()
    with pytest.raises(BrokerUnavailable, match="was not sent"):
        async with harness.opened[0].slot(build_request()):
            raise AssertionError("there was no slot")
    await asyncio.sleep(1)
    harness.server.start()
    callers.remove(ended)
    # The number of further calls depends on the duration of the call that ended.
    await harness.until(lambda: count_holders(callers) >= 4)
    await wait_until_async(
        lambda: harness.count("held"),
        SOON_S,
        "the callers hold all",
        accepts=lambda held: held == count_holders(callers),
    )
    assert await harness.count("held") + await harness.count("waiting") == len(callers)
    await drain(harness, callers, at_once=4)


async def test_a_redis_that_refuses_writes_fails_new_calls_and_accepts_releases(harness: Harness) -> None:
    admission = harness.open()
    first = Caller(admission)
    await first.has_slot.wait()
    await harness.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerUnavailable, match=r"Redis does not answer.*memory"):
            async with admission.slot(build_request()):
                raise AssertionError("there was no slot")
    finally:
        await harness.client.config_set("maxmemory", 0)
    await first.end()
    await harness.until(lambda: True, "held", 0)


async def test_closing_releases_all_slots_and_fails_waiting_calls(harness: Harness) -> None:
    await harness.set_slots(1)
    admission = harness.open()
    callers = [Caller(admission) for _ in range(3)]
    await harness.until(lambda: count_holders(callers) == 1, "waiting", 2)
    await admission.aclose()
    assert (await harness.count("held"), await harness.count("waiting")) == (0, 0)
    for caller in callers:
        caller.may_end.set()
    ends = await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["BrokerUnavailable", "BrokerUnavailable", "NoneType"]
    with pytest.raises(BrokerUnavailable):
        async with admission.slot(build_request()):
            raise AssertionError("it is closed")


async def test_ten_calls_of_one_tenant_pass_two_thousand_of_another(harness: Harness) -> None:
    workers = asyncio.Semaphore(4)

    async def call(admission: SharedAdmission, tenant: str) -> None:
        async with admission.slot(build_request(tenant, wait_s=60.0)) as slot, workers:
            await asyncio.sleep(0.01)
            slot.used_s = 0.01

    crowd, few = harness.open(), harness.open()
    await call(few, "b")
    async with AsyncExitStack() as stack:
        flood = [asyncio.create_task(call(crowd, "a")) for _ in range(2000)]
        stack.push_async_callback(asyncio.gather, *flood, return_exceptions=True)
        await harness.until(lambda: count_done(flood) >= 50)
        before = count_done(flood)
        await asyncio.gather(*(call(few, "b") for _ in range(10)))
        passed = count_done(flood) - before
        for task in flood:
            task.cancel()
    # In one queue all calls would pass. benchmarks/fairness.py measures the duration.
    assert passed < 500
