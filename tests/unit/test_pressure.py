"""What autoscalers are told: of calls that wait for slots and not for their tenant's own limits, and of hosts that
sessions fill.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from contract.hosts import HostReport
from contract.names import POOL_WEB, host_key, hosts_key
from contract.tenancy import TenantPolicy
from orchestrator.operations.pressure_server import PressureServer
from store.pressure import Pressure, QueuePressure
from tests.admission_ground import DEPLOYMENT, Ground, set_slots
from tests.conftest import RedisProcess
from tests.fake_hosts import build_report


@asynccontextmanager
async def open_pressure(server: RedisProcess, ground: Ground | None = None) -> AsyncIterator[Pressure]:
    async with redis.asyncio.Redis.from_url(server.url, socket_timeout=10) as client:
        yield Pressure(client, DEPLOYMENT, None if ground is None else lambda: ground.now)


@asynccontextmanager
async def serve(pressure: Pressure) -> AsyncIterator[int]:
    async with await asyncio.start_server(PressureServer(pressure).serve, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1])


async def fetch(port: int, request: bytes) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


def report_to(server: RedisProcess, *reports: HostReport) -> None:
    with server.client() as client:
        for report in reports:
            client.set(host_key(DEPLOYMENT, report.queue), report.model_dump_json())
            client.zadd(hosts_key(DEPLOYMENT), {report.queue: 1})


async def test_calls_that_wait_for_slots_are_counted_from_when_they_came(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        ground = Ground(client)
        set_slots(client, 2, POOL_WEB)
        for _ in range(5):
            ground.ask(queue=POOL_WEB, limit_s=0.5)
            ground.now += 1
        async with open_pressure(redis_server, ground) as pressure:
            assert await pressure.queue(POOL_WEB) == QueuePressure(
                POOL_WEB, slots=2, held=3, waiting=2, stopped=0, oldest_s=2.0
            )


async def test_who_waits_for_a_limit_of_his_own_asks_for_no_worker(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        ground = Ground(client)
        set_slots(client, 8, POOL_WEB)
        for _ in range(4):
            ground.ask(queue=POOL_WEB, limit_s=0.5, policy=TenantPolicy(in_flight=1))
        ground.now += 60
        async with open_pressure(redis_server, ground) as pressure:
            found = await pressure.queue(POOL_WEB)
    assert (found.held, found.waiting, found.stopped, found.oldest_s, found.as_json()["demand"]) == (1, 0, 3, 0.0, 1)


async def test_a_queue_that_nobody_uses_is_all_zero(redis_server: RedisProcess) -> None:
    async with open_pressure(redis_server) as pressure:
        assert await pressure.queue(POOL_WEB) == QueuePressure(POOL_WEB, 0, 0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("reports", "wanted"),
    [
        ([], 1),
        ([build_report("a"), build_report("b")], 1),
        ([build_report("a", sessions=70), build_report("b", sessions=70)], 2),
        ([build_report("a", sessions=100), build_report("b", sessions=100)], 3),
        ([build_report("a", busy=4), build_report("b", busy=4)], 3),
        ([build_report("a", sessions=70, draining=True), build_report("b", sessions=70)], 2),
        ([build_report("w", kind="web", busy=4), build_report("b")], 1),
    ],
    ids=["nobody", "idle", "at the mark", "full", "busy", "one drains", "web workers"],
)
async def test_hosts_are_wanted_by_sessions_and_by_calls(
    redis_server: RedisProcess, reports: list[HostReport], wanted: int
) -> None:
    report_to(redis_server, *reports)
    async with open_pressure(redis_server) as pressure:
        assert (await pressure.hosts()).wanted == wanted


async def test_it_is_told_over_http(redis_server: RedisProcess) -> None:
    report_to(redis_server, build_report("a", sessions=90))
    async with open_pressure(redis_server) as pressure, serve(pressure) as port:
        status, told = await fetch(port, b"GET /hosts HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, told["wanted"], told["sessions"]) == (200, 2, 90)
        status, told = await fetch(port, b"GET /queues/pool.web?a=b HTTP/1.1\r\n\r\n")
        assert (status, told["demand"], told["oldest_s"]) == (200, 0, 0.0)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /queues/host.a.1 HTTP/1.1", 404),
        (b"GET /../etc/passwd HTTP/1.1", 404),
        (b"POST /hosts HTTP/1.1", 405),
        (b"\xff\xfe", 400),
        (b"GET /alive HTTP/1.1", 200),
    ],
)
async def test_whatever_is_asked_is_answered(redis_server: RedisProcess, request_line: bytes, status: int) -> None:
    async with open_pressure(redis_server) as pressure, serve(pressure) as port:
        assert (await fetch(port, request_line + b"\r\n\r\n"))[0] == status


async def test_a_request_without_end_is_cut_off(redis_server: RedisProcess) -> None:
    async with open_pressure(redis_server) as pressure, serve(pressure) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * 1_000_000)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_without_redis_it_is_said_and_it_still_lives(redis_server: RedisProcess) -> None:
    # A port at which nobody listens.
    with_nobody = redis.asyncio.Redis(host="127.0.0.1", port=1, socket_timeout=1, retry=Retry(NoBackoff(), 0))
    async with with_nobody as client, serve(Pressure(client, DEPLOYMENT)) as port:
        status, told = await fetch(port, b"GET /hosts HTTP/1.1\r\n\r\n")
        assert (status, "is up" in told["error"]) == (503, True)
        assert (await fetch(port, b"GET /alive HTTP/1.1\r\n\r\n"))[0] == 200
