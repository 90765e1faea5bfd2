"""The page of metrics: the current state in Redis, in the format that Prometheus parsers read, whatever data other
clients wrote there.
"""

import json
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

from tests.conftest import RedisProcess
from tests.repository.test_metric_files import promtool
from tests.support.redis.admission_harness import DEPLOYMENT, Harness, set_slots
from tests.support.redis.redis_harness import open_server
from tests.support.sandboxd.fake_hosts import build_report
from tests.support.stack.metric_harness import key, nonzero_samples, read_page
from toolcrew.contract import metrics
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.names import (
    POOL_WEB,
    admission_prefix,
    call_key,
    host_key,
    hosts_key,
    refusals_key,
    runs_prefix,
    tenants_key,
)
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.metrics import page as page_module
from toolcrew.orchestrator.metrics.page import MetricsPage
from toolcrew.orchestrator.metrics.samples import choose_format
from toolcrew.store.approvals import approvals_key
from toolcrew.store.batches import batch_key
from toolcrew.store.metrics import (
    ABSORB,
    ROWS_PER_READ,
    Counts,
    absorb_values,
    host_gauges_key,
    metrics_key,
)
from toolcrew.store.pressure import Pressure
from toolcrew.store.usage import pack_amounts, usage_prefix

QUEUE = "host.h1.b00t"
HOSTILE = 'a"b\\c\nd\u202e{}'


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator["redis.Redis"]:
    with redis_server.client() as opened:
        yield opened


@pytest.fixture
async def page(redis_server: RedisProcess) -> AsyncIterator[MetricsPage]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=10) as opened:
        yield MetricsPage(opened, DEPLOYMENT)


def report(client: "redis.Redis", *reports: HostReport) -> None:
    for host_report in reports:
        client.set(host_key(DEPLOYMENT, host_report.queue), host_report.model_dump_json())
        client.zadd(hosts_key(DEPLOYMENT), {host_report.queue: time.time()})


def absorb(client: "redis.Redis", counts: Counts) -> None:
    while (sending := counts.pending()) is not None:
        ABSORB.run_blocking(client, **absorb_values(DEPLOYMENT, "x", sending))
        counts.settle(sending)


def queue_call(client: "redis.Redis", queue: str, age_s: float, call: str = "c1") -> None:
    """Queue a message as publishing does, with the record of its call."""
    record = call_key(DEPLOYMENT, "acme", call)
    client.hset(record, mapping={"state": "queued", "queued_at": time.time() - age_s})
    client.lpush(
        queue, json.dumps({"body": "eHh4" * 2000, "headers": {"task": "tool.x", "call_key": record}, "properties": {}})
    )


async def test_empty_deployment_renders_zeros_that_promtool_accepts(page: MetricsPage) -> None:
    text = await page.render()
    series = read_page(text)
    assert series[key("toolcrew_sandbox_oom_total")] == 0
    assert series[key("toolcrew_envelope_refusals_total", reason="signature")] == 0
    assert series[key("toolcrew_queue_messages", queue=POOL_WEB)] == 0
    assert series[key("toolcrew_lost_hosts")] == 0
    promtool("check", "metrics", text=text)


async def test_counts_render_in_text_and_openmetrics_format(page: MetricsPage, client: "redis.Redis") -> None:
    counts = Counts()
    counts.count(metrics.CALLS, "bash_tool", "error", "TIMEOUT", by=2)
    counts.count(metrics.TOKENS, HOSTILE, "input", by=7)
    for value in (0.05, 3.0, 9999.0):
        counts.observe(metrics.CALL_SECONDS, value, "bash_tool")
    absorb(client, counts)
    for is_open in (False, True):
        series = read_page(await page.render(is_open=is_open), is_open=is_open)
        assert series[key("toolcrew_tool_calls_total", tool="bash_tool", status="error", error_code="TIMEOUT")] == 2
        assert series[key("toolcrew_llm_tokens_total", model=metrics.clean_label(HOSTILE), direction="input")] == 7
        buckets = {
            bound: series[key("toolcrew_tool_duration_seconds_bucket", tool="bash_tool", le=bound)]
            for bound in ("0.1", "5.0", "+Inf")
        }
        assert buckets == {"0.1": 1, "5.0": 2, "+Inf": 3}
        assert series[key("toolcrew_tool_duration_seconds_sum", tool="bash_tool")] == pytest.approx(10002.05)
    promtool("check", "metrics", text=await page.render())
    assert (await page.render(is_open=True)).endswith(b"# EOF\n")
    assert choose_format("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert not choose_format("text/plain")


async def test_host_load_and_sandbox_states_are_rendered(page: MetricsPage, client: "redis.Redis") -> None:
    web = build_report("h1", queue="pool.h1.a", kind="web", slots=2, busy=1, max_sessions=0, max_sandboxes=0)
    other = build_report(
        "h1", queue="pool.h1.b", kind="web", slots=2, busy=2, max_sessions=0, max_sandboxes=0, draining=True
    )
    report(
        client,
        build_report("h1", busy=3, sessions=5, sandboxes=4, disk_free_bytes=77),
        web,
        other,
        build_report("h2", healthy=False),
    )
    report(client, build_report("h3", worker="", draining=True, sessions=9))
    gauges = {"sandboxes": {"busy": 3, "idle": 1, "warm": 2, "invented": 5}, "warm_target": 4}
    client.set(host_gauges_key(DEPLOYMENT, QUEUE), json.dumps(gauges))
    client.set(host_gauges_key(DEPLOYMENT, "host.h2.b00t"), "no json")
    series = read_page(await page.render())
    assert nonzero_samples(series, "toolcrew_hosts") == {
        ("sandbox", "serving"): 1,
        ("sandbox", "unhealthy"): 1,
        ("sandbox", "restarting"): 1,
        ("web", "serving"): 1,
        ("web", "draining"): 1,
    }
    assert series[key("toolcrew_host_busy", host="h1", kind="web")] == 3
    assert series[key("toolcrew_host_slots", host="h1", kind="web")] == 4
    assert nonzero_samples(series, "toolcrew_host_sessions") == {("h1",): 5}
    assert series[key("toolcrew_host_disk_free_bytes", host="h1")] == 77
    assert nonzero_samples(series, "toolcrew_sandbox_active") == {
        ("h1", "busy"): 3,
        ("h1", "idle"): 1,
        ("h1", "warm"): 2,
    }
    assert nonzero_samples(series, "toolcrew_warm_pool_target") == {("h1",): 4}
    assert series[key("toolcrew_calls", state="running")] == 6


async def test_queue_of_a_silent_host_is_counted_as_dead(page: MetricsPage, client: "redis.Redis") -> None:
    client.zadd(hosts_key(DEPLOYMENT), {"host.gone.1": 1, "host.empty.1": 1, "pool.gone.1": 1})
    queue_call(client, "host.gone.1", 300)
    series = read_page(await page.render())
    values = [
        series[key(name)]
        for name in ("toolcrew_lost_hosts", "toolcrew_dead_host_queues", "toolcrew_dead_host_queue_messages")
    ]
    assert values == [3, 1, 1]
    assert series[key("toolcrew_queue_oldest_message_seconds", queue="host.gone.1")] >= 300


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xfe" * 3000,
        b'{"call_key": "toolcrew:other:t:x:call.y"}',
        b'{"call_key": "toolcrew:d:tenants"',
        b'{"call_key": ["a"]}',
        b'"call_key": "' + b"x" * 9000,
        b'{"call_key": "toolcrew:d:t:acme:call.text"}',
    ],
)
async def test_unreadable_queue_message_is_counted(page: MetricsPage, client: "redis.Redis", message: bytes) -> None:
    client.lpush(POOL_WEB, message)
    client.hset(call_key(DEPLOYMENT, "acme", "text"), "queued_at", "nan")
    series = read_page(await page.render())
    assert series[key("toolcrew_queue_messages", queue=POOL_WEB)] == 1
    assert series.get(key("toolcrew_queue_oldest_message_seconds", queue=POOL_WEB), 0.0) in (0.0, 86400.0)


async def test_running_and_waiting_calls_are_rendered_per_tenant_and_queue(
    page: MetricsPage, client: "redis.Redis"
) -> None:
    client.hset(
        tenants_key(DEPLOYMENT), mapping={"acme": TenantPolicy().model_dump_json(), "idle": "{}", "#version": "x"}
    )
    harness = Harness(client, now=time.time() - 50)
    set_slots(client, 2, POOL_WEB)
    for _ in range(5):
        harness.ask("acme", queue=POOL_WEB, limit_s=0.5)
    series = read_page(await page.render())
    assert nonzero_samples(series, "toolcrew_tenant_calls") == {("in_flight", "acme"): 3, ("waiting", "acme"): 2}
    assert nonzero_samples(series, "toolcrew_queue_calls") == {(POOL_WEB, "in_flight"): 3, (POOL_WEB, "waiting"): 2}
    assert series[key("toolcrew_queue_slots", queue=POOL_WEB)] == 2
    assert series[key("toolcrew_queue_oldest_waiting_call_seconds", queue=POOL_WEB)] >= 50
    assert series[key("toolcrew_tenants")] == 2
    assert series[key("toolcrew_tenant_calls", tenant="idle", state="waiting")] == 0


def request_random_calls(harness: Harness, seed: int) -> None:
    """Request calls of all lanes, for tenants some of which may run only one call at a time, with a tenth of a second
    between arrivals.
    """
    chance = random.Random(seed)
    narrow, wide = TenantPolicy(in_flight=1), TenantPolicy()
    harness.record_duration("bolt", 2.0)
    for _ in range(80):
        harness.now += 0.1
        if harness.held and chance.random() < 0.3:
            harness.end(chance.choice(harness.held))
            continue
        tenant = chance.choice(["acme", "bolt", "cyan", "dyer"])
        fields = {"priority": chance.choice(["interactive", "batch"]), "limit_s": chance.choice([0.5, 30.0])}
        harness.ask(
            tenant, queue=chance.choice([POOL_WEB, QUEUE]), policy=narrow if tenant == "cyan" else wide, **fields
        )


@pytest.mark.parametrize("seed", range(8))
async def test_oldest_wait_equals_the_autoscaler_value(
    page: MetricsPage, client: "redis.Redis", redis_server: RedisProcess, seed: int
) -> None:
    report(client, build_report("h1"))
    harness = Harness(client, now=time.time() - 2000)
    for queue in (POOL_WEB, QUEUE):
        set_slots(client, 3, queue)
    request_random_calls(harness, seed)
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=10) as opened:
        pressure = Pressure(opened, DEPLOYMENT)
        before = [await pressure.queue(queue) for queue in (POOL_WEB, QUEUE)]
        series = read_page(await page.render())
        after = [await pressure.queue(queue) for queue in (POOL_WEB, QUEUE)]
    values = [series[key("toolcrew_queue_oldest_waiting_call_seconds", queue=queue)] for queue in (POOL_WEB, QUEUE)]
    assert any(values)
    for early, waited_s, late in zip(before, values, after, strict=True):
        assert early.oldest_s - 0.01 <= waited_s <= late.oldest_s + 0.01


async def test_oldest_wait_includes_deferred_long_calls(page: MetricsPage, client: "redis.Redis") -> None:
    harness = Harness(client, now=time.time() - 50)
    set_slots(client, 2, POOL_WEB)
    for _ in range(2):
        harness.ask("acme", queue=POOL_WEB, limit_s=30.0)
    assert client.smembers(f"{admission_prefix(DEPLOYMENT)}stuck:{POOL_WEB}") == {b"acme"}
    series = read_page(await page.render())
    assert series[key("toolcrew_queue_oldest_waiting_call_seconds", queue=POOL_WEB)] >= 50


async def test_usage_series_are_limited_to_the_largest_tenants(
    page: MetricsPage, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MAX_TENANTS", 1)
    client.hset(tenants_key(DEPLOYMENT), mapping=dict.fromkeys(("acme", "beta", "cyan", "idle"), "{}"))
    today = int(time.time() // 86_400)
    for at, tenant in enumerate(("acme", "beta", "cyan")):
        fields = {"7": pack_amounts({"cpu_us": 9_000_000 - at * 1_000_000}), "8": b"no number", "x": b"1"}
        client.hset(f"{usage_prefix(DEPLOYMENT, tenant)}{today}", mapping=fields)  # type: ignore[arg-type]
    series = read_page(await page.render())
    assert nonzero_samples(series, "toolcrew_tenant_usage_today") == {("cpu_s", "acme"): 9.0, ("cpu_s", "other"): 15.0}


@pytest.mark.parametrize("first", ["a", "z"])
async def test_more_entries_than_one_read_are_all_rendered(
    page: MetricsPage, client: "redis.Redis", first: str
) -> None:
    number = 2 * ROWS_PER_READ + 1
    tenants = [first, *(f"tenant-{at}" for at in range(1, number))]
    client.hset(tenants_key(DEPLOYMENT), mapping=dict.fromkeys(tenants, "{}"))
    client.zadd(hosts_key(DEPLOYMENT), {f"host.gone.{at}": 1 for at in range(number)})
    queue_call(client, f"host.gone.{number - 1}", 300)
    harness = Harness(client, now=time.time() - 500)
    set_slots(client, 1, POOL_WEB)
    while len(harness.kept("waiting")) == 0:
        harness.ask("holder", queue=POOL_WEB)
    harness.end(next(iter(harness.kept("waiting"))))
    for tenant in tenants:
        harness.ask(tenant, queue=POOL_WEB)
        harness.now += 15 if tenant == first else 0
    series = read_page(await page.render())
    assert nonzero_samples(series, "toolcrew_tenant_calls") == {("waiting", tenant): 1 for tenant in tenants}
    assert series[key("toolcrew_queue_oldest_waiting_call_seconds", queue=POOL_WEB)] >= 500
    assert (series[key("toolcrew_lost_hosts")], series[key("toolcrew_dead_host_queues")]) == (number, 1)


@pytest.mark.parametrize("call", ["no json", '{"since": "yesterday"}', '{"since": -1e999}', '{"since": 1e400}'])
async def test_invalid_admission_state_does_not_break_the_page(
    page: MetricsPage, client: "redis.Redis", call: str
) -> None:
    admission = admission_prefix(DEPLOYMENT)
    client.hset(f"{admission}queue:{POOL_WEB}", "waiting", 3)
    client.set(f"{admission}ready:{POOL_WEB}:short", "text")
    client.sadd(f"{admission}stuck:{POOL_WEB}", "acme", b"\xff", "bolt")
    client.set(f"{admission}pair:{POOL_WEB}|acme", "text")
    client.hset(f"{admission}pair:{POOL_WEB}|bolt", "batch:long", 1)
    client.zadd(f"{admission}lane:{POOL_WEB}|bolt:batch:long", {"x.1": 1})
    client.hset(f"{admission}waiting", "x.1", call)
    series = read_page(await page.render())
    assert series[key("toolcrew_queue_calls", queue=POOL_WEB, state="waiting")] == 3
    assert series[key("toolcrew_queue_oldest_waiting_call_seconds", queue=POOL_WEB)] == 0


async def test_run_states_and_waiting_approvals_are_rendered(page: MetricsPage, client: "redis.Redis") -> None:
    runs = runs_prefix(DEPLOYMENT)
    client.zadd(f"{runs}batches", {"acme|b1": 1, "strange": 2})
    client.zadd(batch_key(DEPLOYMENT, "acme", "b1") + ":waiting", {"r1": 1, "r2": 2})
    client.zadd(f"{runs}leases", {"acme|r3": 1})
    client.zadd(approvals_key(DEPLOYMENT), {"over": (time.time() - 1) * 1000, "open": (time.time() + 100) * 1000})
    series = read_page(await page.render())
    assert nonzero_samples(series, "toolcrew_runs") == {("waiting",): 2, ("running",): 1}
    assert series[key("toolcrew_approvals_waiting")] == 1


@pytest.mark.parametrize("name", ["batches", "delayed", "leases"])
async def test_run_queue_key_of_a_wrong_type_does_not_break_the_page(
    page: MetricsPage, client: "redis.Redis", name: str
) -> None:
    client.set(runs_prefix(DEPLOYMENT) + name, "of another program")
    client.zadd(approvals_key(DEPLOYMENT), {"open": (time.time() + 100) * 1000})
    series = read_page(await page.render())
    assert nonzero_samples(series, "toolcrew_runs") == {}
    assert series[key("toolcrew_approvals_waiting")] == 1


async def test_invalid_fields_are_skipped_and_counted(page: MetricsPage, client: "redis.Redis") -> None:
    invalid_fields = {
        b"\xff\xfe": "1",
        "": "2",
        "count\ttoolcrew_nonesuch": "1",
        "\ttoolcrew_sandbox_oom_total": "nan",
        "#mark": "5",
    }
    client.hset(metrics_key(DEPLOYMENT), mapping=invalid_fields)  # type: ignore[arg-type]
    client.hset(refusals_key(DEPLOYMENT), mapping={HOSTILE: "3", "signature": "2", "expired": "many"})
    client.zadd(hosts_key(DEPLOYMENT), {b"\xff": 1, f"toolcrew:{DEPLOYMENT}:tenants": 1, HOSTILE: 1})
    client.hset(tenants_key(DEPLOYMENT), "acme", "{}")
    giant = build_report("h1", disk_free_bytes=10**300, busy=10**400)
    report(client, giant)
    client.set(f"toolcrew:{DEPLOYMENT}:slots:{QUEUE}", "inf")
    series = read_page(await page.render())
    assert series[key("toolcrew_metrics_unreadable_fields")] == 4
    assert series[key("toolcrew_envelope_refusals_total", reason="signature")] == 2
    assert series[key("toolcrew_queue_slots", queue=QUEUE)] == 0
    assert series[key("toolcrew_lost_hosts")] == 3


async def test_page_without_the_info_permission_omits_only_redis_memory() -> None:
    with open_server(users=True) as server:
        async with redis.asyncio.Redis.from_url(server.url("orchestrator")) as opened:
            series = read_page(await MetricsPage(opened, "default").render())
            assert series[key("toolcrew_redis_memory_used_bytes")] > 0
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "orchestrator", "-info")
        async with redis.asyncio.Redis.from_url(server.url("orchestrator")) as opened:
            series = read_page(await MetricsPage(opened, "default").render())
        assert key("toolcrew_redis_memory_used_bytes") not in series
        assert series[key("toolcrew_build_info", release="1")] == 1
