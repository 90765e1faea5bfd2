"""The contract of every admission implementation."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from contract.names import slots_key
from orchestrator.admission import Admission, SharedAdmission, UnlimitedAdmission
from tests.admission_harness import DEPLOYMENT, QUEUE, build_request
from tests.conftest import RedisProcess


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


async def test_a_call_gets_a_slot_and_nothing_is_charged_for_it_yet(admission: Admission) -> None:
    async with admission.slot(build_request()) as slot:
        assert slot.used_s is None


async def test_many_calls_come_through_one_after_the_other_and_together(admission: Admission) -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        async with admission.slot(build_request(tenant=f"t{number % 3}")) as slot:
            slot.used_s = 0.001
        ended.append(number)

    await asyncio.gather(*(call(number) for number in range(200)))
    assert sorted(ended) == list(range(200))


async def test_an_error_in_the_block_is_the_caller_s_own_and_the_slot_is_given_back(admission: Admission) -> None:
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            async with admission.slot(build_request()):
                raise ZeroDivisionError


async def test_an_urgent_call_passes_those_that_hold_everything(admission: Admission) -> None:
    may_end = asyncio.Event()

    async def hold() -> None:
        async with admission.slot(build_request()):
            await may_end.wait()

    holding = [asyncio.create_task(hold()) for _ in range(10)]
    async with asyncio.timeout(20), admission.slot(build_request(is_urgent=True)):
        may_end.set()
    await asyncio.gather(*holding)


async def test_a_use_that_is_no_number_of_seconds_is_not_charged(admission: Admission) -> None:
    for used_s in (float("nan"), float("inf"), -5.0, 1e300):
        async with admission.slot(build_request()) as slot:
            slot.used_s = used_s
    async with admission.slot(build_request()):
        pass
