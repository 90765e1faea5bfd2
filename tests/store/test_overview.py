"""The overview of a deployment: hosts, queues, tenants and batches as stored in Redis. A thousand tenants do not slow
the overview down.
"""

import time

import pytest
import redis
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.redis.admission_harness import DEPLOYMENT, Harness, set_slots
from tests.support.runs.run_harness import RunHarness, build_outcome
from tests.support.sandboxd.fake_hosts import build_report
from toolcrew.contract.names import host_key, hosts_key, tenants_key
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.tenancy import TenantPolicy, seal_policy
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.store.overview import OverviewReader
from toolcrew.store.sessions import SessionStore
from toolcrew.store.tenants import RedisTenants

QUEUE = "host.h1.b00t"


@pytest.fixture
def reader(client: "redis.asyncio.Redis") -> OverviewReader:
    return OverviewReader(client, DEPLOYMENT, KEY)


async def report_host(client: "redis.asyncio.Redis", name: str = "h1", **fields: object) -> None:
    report = build_report(name, **fields)
    await client.zadd(hosts_key(DEPLOYMENT), {report.queue: time.time()})
    await client.set(host_key(DEPLOYMENT, report.queue), report.model_dump_json())


async def test_empty_deployment_has_only_pool_queues(reader: OverviewReader) -> None:
    overview = await reader.read()

    assert (overview.hosts, overview.batches) == ((), ())
    assert [(tenant.tenant, tenant.is_registered) for tenant in overview.tenants] == [("default", True)]
    assert [(queue.queue, queue.length, queue.slots) for queue in overview.queues] == [
        ("pool.tools", 0, 0),
        ("pool.web", 0, 0),
    ]
    assert (
        overview.slots,
        overview.slots_in_use,
        overview.sessions,
        overview.waiting,
        overview.runs,
        overview.items,
        overview.approvals,
    ) == (0,) * 7


async def test_queue_reports_waiting_calls_and_the_oldest_wait(
    client: "redis.asyncio.Redis", reader: OverviewReader, redis_server: RedisProcess
) -> None:
    await report_host(client)
    await client.rpush(QUEUE, "a message", "another")
    with redis_server.client() as blocking:
        harness = Harness(blocking, now=time.time() - 40)
        set_slots(blocking, 2, QUEUE)
        for _ in range(5):
            harness.ask("acme", queue=QUEUE, limit_s=30.0)
        harness.now += 30
        for _ in range(2):
            harness.ask("bolt", queue=QUEUE, limit_s=0.5)

    overview = await reader.read()

    queue = overview.queues[0]
    # One call of a second or more is all that a tenant may hold of two slots.
    assert (queue.queue, queue.length, queue.slots) == (QUEUE, 2, 2)
    assert queue.held + queue.waiting == 7
    assert queue.waiting == overview.waiting > 0
    assert queue.oldest_s is not None
    assert 39 < queue.oldest_s < 300


async def test_tenants_are_listed_by_calls_with_shares_and_unregistered_ones(
    client: "redis.asyncio.Redis", reader: OverviewReader, redis_server: RedisProcess
) -> None:
    tenants = RedisTenants(client, DEPLOYMENT, KEY)
    await tenants.add("acme", TenantPolicy(weight=3.0, in_flight=8))
    await tenants.add("idle", TenantPolicy(is_paused=True))
    await client.hset(tenants_key(DEPLOYMENT), "torn", "{")
    await report_host(client)
    with redis_server.client() as blocking:
        harness = Harness(blocking, now=time.time())
        set_slots(blocking, 8, QUEUE)
        for _ in range(3):
            harness.ask("acme", queue=QUEUE, limit_s=0.5)
        harness.ask("stranger", queue=QUEUE, limit_s=0.5)

    tenant_rows = {tenant.tenant: tenant for tenant in (await reader.read()).tenants}

    assert list(tenant_rows) == ["acme", "stranger", "default", "idle", "torn"]
    assert tenant_rows["acme"].held == 3
    assert tenant_rows["acme"].in_flight == 8
    assert tenant_rows["acme"].share == 0.75
    assert tenant_rows["acme"].fair_share == 0.75
    assert tenant_rows["stranger"].held == 1
    assert tenant_rows["stranger"].is_registered is False
    assert tenant_rows["stranger"].share == 0.25
    assert (tenant_rows["idle"].held, tenant_rows["idle"].share, tenant_rows["idle"].fair_share) == (0, 0.0, 0.0)
    assert [name for name, tenant in tenant_rows.items() if tenant.is_paused] == ["idle"]
    assert "cannot be verified" in tenant_rows["torn"].problem


async def test_tenants_with_sessions_are_listed_while_no_tenant_is_registered(
    client: "redis.asyncio.Redis", reader: OverviewReader
) -> None:
    await SessionStore(client, DEPLOYMENT).open("bolt", "s1", QUEUE, start="{}", ttl_s=60, limit=9)
    assert [(tenant.tenant, tenant.is_registered) for tenant in (await reader.read()).tenants] == [
        ("bolt", False),
        ("default", True),
    ]

    tenants = RedisTenants(client, DEPLOYMENT, KEY)
    await tenants.add("acme", TenantPolicy())
    assert [tenant.tenant for tenant in (await reader.read()).tenants] == ["acme", "default"]

    await tenants.remove("acme")
    assert [tenant.tenant for tenant in (await reader.read()).tenants] == ["default"]


async def test_rate_limited_tenant_is_listed_with_waiting_calls(
    client: "redis.asyncio.Redis", reader: OverviewReader, redis_server: RedisProcess
) -> None:
    await report_host(client)
    with redis_server.client() as blocking:
        harness = Harness(blocking, now=time.time() - 40)
        set_slots(blocking, 8, QUEUE)
        for _ in range(4):
            harness.ask("slow", queue=QUEUE, limit_s=0.5, policy=TenantPolicy(rate_per_s=0.01, burst=1))
        harness.end(harness.held[0])

    overview = await reader.read()

    assert [(tenant.tenant, tenant.held, tenant.waiting) for tenant in overview.tenants] == [
        ("slow", 0, 3),
        ("default", 0, 0),
    ]
    # The wait counts from the request, also while a limit of the tenant blocks the calls.
    assert overview.queues[0].oldest_s is not None
    assert 39 < overview.queues[0].oldest_s < 300


async def test_batches_are_listed_until_they_end(client: "redis.asyncio.Redis", reader: OverviewReader) -> None:
    runs = RunHarness(client)
    await runs.submit(3, batch="waits", concurrency=1)
    await runs.submit(1, batch="runs", tenant="bolt")
    await runs.submit(1, batch="over", tenant="cyan")
    claims = {(claim.tenant, claim.record.batch): claim for claim in await runs.queue.claim(10)}
    finished = claims["cyan", "over"]
    await runs.queue.finish(finished, build_outcome(finished))

    overview = await reader.read()

    batches = {batch.batch: (batch.tenant, batch.total, batch.running, batch.waiting) for batch in overview.batches}
    assert batches == {"waits": ("acme", 3, 1, 2), "runs": ("bolt", 1, 1, 0)}
    assert (overview.runs, overview.items) == (0, 2)


async def test_runs_and_items_of_batches_are_counted_separately(
    client: "redis.asyncio.Redis", reader: OverviewReader
) -> None:
    runs, tenants = RunHarness(client), RedisTenants(client, DEPLOYMENT, KEY)
    durable_runs = DurableRuns(client, DEPLOYMENT, KEY, tenants)
    await runs.submit(3, batch="b", tenant="bolt")
    for tenant in ("bolt", "cyan"):
        await durable_runs.start(tenant, RunBody(instruction="Count the files."))
    assert len(await runs.queue.claim(10)) == 5

    overview = await reader.read()

    assert (overview.runs, overview.items) == (2, 3)


async def test_overview_does_not_read_every_batch_of_a_tenant(
    client: "redis.asyncio.Redis", reader: OverviewReader
) -> None:
    runs = RunHarness(client)
    await runs.submit(1, batch="one", tenant="bolt")
    many = {f"acme|b{number}": float(number) for number in range(5_000)}
    await client.zadd("toolcrew:d:runs:batches", many)
    await client.config_resetstat()
    await reader.read()
    assert (await client.info("commandstats"))["cmdstat_hmget"]["calls"] < 100


async def test_overview_of_1000_tenants_takes_no_extra_round_trips(
    client: "redis.asyncio.Redis", reader: OverviewReader, redis_server: RedisProcess
) -> None:
    async def count_reads() -> int:
        with redis_server.client() as blocking:
            before = int(blocking.info("stats")["total_reads_processed"])
            await reader.read()
            return int(blocking.info("stats")["total_reads_processed"]) - before

    await reader.read()
    few = await count_reads()
    policies = {
        name: seal_policy(KEY, name, TenantPolicy(weight=1.5))
        for name in (f"tenant-{number}" for number in range(1000))
    }
    await client.hset(tenants_key(DEPLOYMENT), mapping=policies)
    many = await count_reads()

    # Long names in one request may come in more than one piece.
    assert many - few < 10
    assert len((await reader.read()).tenants) == 1001
