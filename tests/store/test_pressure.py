"""Metrics for autoscalers: calls that wait for slots, without calls that wait for their tenant's own limits, and
hosts that are full of sessions.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.api.api_harness import open_api
from tests.support.redis.admission_harness import DEPLOYMENT, Harness, set_slots
from tests.support.sandboxd.fake_hosts import build_report
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import POOL_WEB, host_key, hosts_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.pressure import Pressure, QueuePressure


@asynccontextmanager
async def open_pressure(server: RedisProcess, harness: Harness | None = None) -> AsyncIterator[Pressure]:
    async with redis.asyncio.Redis.from_url(server.url, socket_timeout=10) as client:
        yield Pressure(client, DEPLOYMENT, None if harness is None else lambda: harness.now)


def report_to(server: RedisProcess, *reports: HostReport, deployment: str = DEPLOYMENT) -> None:
    with server.client() as client:
        for report in reports:
            client.set(host_key(deployment, report.queue), report.model_dump_json())
            client.zadd(hosts_key(deployment), {report.queue: 1})


async def test_waiting_calls_are_counted_with_the_oldest_wait(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        harness = Harness(client)
        set_slots(client, 2, POOL_WEB)
        for _ in range(5):
            harness.ask(queue=POOL_WEB, limit_s=0.5)
            harness.now += 1
        async with open_pressure(redis_server, harness) as pressure:
            assert await pressure.queue(POOL_WEB) == QueuePressure(
                slots=2, held=3, waiting=2, stopped=0, oldest_s=2.0, demand=5
            )


async def test_calls_at_the_tenant_limit_add_no_demand(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        harness = Harness(client)
        set_slots(client, 8, POOL_WEB)
        for _ in range(4):
            harness.ask(queue=POOL_WEB, limit_s=0.5, policy=TenantPolicy(in_flight=1))
        harness.now += 60
        async with open_pressure(redis_server, harness) as pressure:
            demand = await pressure.queue(POOL_WEB)
    assert demand.held == 1
    assert demand.waiting == 0
    assert demand.stopped == 3
    assert demand.oldest_s == 0.0
    assert demand.demand == 1


@pytest.mark.parametrize(
    ("reports", "expected_hosts"),
    [
        ([], 1),
        ([build_report("a"), build_report("b")], 1),
        ([build_report("a", sessions=70), build_report("b", sessions=70)], 2),
        ([build_report("a", sessions=100), build_report("b", sessions=100)], 3),
        ([build_report("a", busy=4), build_report("b", busy=4)], 3),
        ([build_report("a", sessions=70, draining=True), build_report("b", sessions=70)], 2),
        ([build_report("w", kind="web", busy=4), build_report("b")], 1),
    ],
    ids=["no worker", "idle", "at the mark", "full", "busy", "one drains", "web workers"],
)
async def test_wanted_hosts_follow_sessions_and_calls(
    redis_server: RedisProcess, reports: list[HostReport], expected_hosts: int
) -> None:
    report_to(redis_server, *reports)
    async with open_pressure(redis_server) as pressure:
        assert (await pressure.hosts()).wanted == expected_hosts


async def test_operator_reads_pressure_over_http(redis_server: RedisProcess) -> None:
    report_to(redis_server, build_report("a", sessions=90), deployment="default")
    async with open_api(redis_server.url) as api:
        response = await api["operator"].get("/v1/pressure")
    body = response.json()
    assert (response.status_code, sorted(body["queues"]), body["queues"]["web"]["demand"]) == (200, ["tools", "web"], 0)
    assert (body["hosts"]["wanted"], body["hosts"]["sessions"]) == (2, 90)
