"""The contract of every admission implementation."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.redis.admission_harness import DEPLOYMENT, QUEUE, build_request
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.names import slots_key
from toolcrew.orchestrator.admission import Admission, SharedAdmission, UnlimitedAdmission


@pytest.fixture(params=["unlimited", "shared"])
async def admission(request: pytest.FixtureRequest) -> AsyncIterator[Admission]:
    if request.param == "unlimited":
        yield UnlimitedAdmission()
        return
    server: RedisProcess = request.getfixturevalue("redis_server")
    async with redis.asyncio.Redis.from_url(server.url, socket_timeout=10) as client:
        await client.set(slots_key(DEPLOYMENT, QUEUE), 4)
        shared = SharedAdmission(client, DEPLOYMENT)
        yield shared
        await shared.aclose()


async def test_a_call_gets_a_slot_without_a_charge(admission: Admission) -> None:
    async with admission.slot(build_request()) as slot:
        assert slot.used_s is None


async def test_many_calls_of_several_tenants_all_get_a_slot(admission: Admission) -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        async with admission.slot(build_request(tenant=f"t{number % 3}")) as slot:
            slot.used_s = 0.001
        ended.append(number)

    await asyncio.gather(*(call(number) for number in range(200)))
    assert sorted(ended) == list(range(200))


async def test_an_error_in_the_block_is_raised_and_releases_the_slot(admission: Admission) -> None:
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            async with admission.slot(build_request()):
                raise ZeroDivisionError


async def test_an_urgent_call_does_not_wait_for_a_slot(admission: Admission) -> None:
    may_end = asyncio.Event()

    async def hold() -> None:
        async with admission.slot(build_request()):
            await may_end.wait()

    holding = [asyncio.create_task(hold()) for _ in range(10)]
    async with asyncio.timeout(SOON_S), admission.slot(build_request(is_urgent=True)):
        may_end.set()
    await asyncio.gather(*holding)


async def test_an_invalid_duration_is_not_charged(admission: Admission) -> None:
    for used_s in (float("nan"), float("inf"), -5.0, 1e300):
        async with admission.slot(build_request()) as slot:
            slot.used_s = used_s
    async with admission.slot(build_request()):
        pass
