"""Measure the duration of a scrape with 1,000 tenants, 200 hosts and 10,000 messages, and the cost of counting per
call.
"""

import asyncio
import base64
import json
import time
from typing import Any

import redis.asyncio
from pydantic import SecretStr

from benchmarks.fairness import open_server, until_it_answers
from benchmarks.report import Report, median
from benchmarks.sizes import size
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import Clocks, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.metrics import CALL_SECONDS, CALLS
from toolcrew.contract.names import admission_prefix, call_key, host_key, hosts_key, tenants_key
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dispatch.middleware import CallMeter
from toolcrew.orchestrator.metrics.page import MetricsPage
from toolcrew.orchestrator.metrics.tally import Tally
from toolcrew.store.connection import open_redis
from toolcrew.store.metrics import Counts, host_gauges_key
from toolcrew.store.slots import Operation, SlotRequest, enqueue, load_script, script_arguments

DEPLOYMENT = "bench"
TENANTS, HOSTS, MESSAGES, WAITING, TOOLS = size((1000, 200, 10_000, 2000, 60), (10, 4, 20, 100, 3))
SCRAPES = size(7, 2)
ASKED_AT_ONCE = 100
LISTED_US, MAX_LISTED = 100, 100
CALLS_MADE = size(20_000, 100)
CALL_CPU_S = 0.003
"""Lowest CPU time of a call in an orchestrator, in seconds (docs/testing.md)."""
TARGET_MS = 100.0
MAX_SCRIPT_MS = 10.0


def run() -> Report:
    return asyncio.run(_run())


async def _run() -> Report:
    report = Report(
        "metrics",
        notes=[
            f"{TENANTS} tenants, {HOSTS} hosts, {MESSAGES} messages, {WAITING} calls that wait for slots, {TOOLS} tools"
        ],
    )
    with open_server() as url:
        broker = BrokerSettings(redis_url=SecretStr(url), secret=SecretStr("bench"), deployment=DEPLOYMENT)
        client = open_redis(broker)
        try:
            await until_it_answers(client)
            await _fill(client)
            page = MetricsPage(client, DEPLOYMENT)
            size = len(await page.render())
            report.add("page_bytes", size, "bytes of the page")
            report.add("scrape_ms", await _measure_scrape(page), "one scrape", at_most=TARGET_MS)
            report.add("scrape_own_ms", await _own_ms(page), "processor time of it")
            times_ms = await _script_times_ms(client)
            report.add("scripts_ms", sum(times_ms), f"Redis's time for its {len(times_ms)} scripts")
            # Redis lists no script that is faster than LISTED_US.
            longest_ms = max(times_ms, default=0.0)
            report.add("longest_script_ms", longest_ms, "of which Redis serves nothing else", at_most=MAX_SCRIPT_MS)
        finally:
            await client.aclose()
    counted_s = _counted_s()
    report.add("counted_ms", counted_s * 1000, "counting one call")
    report.add("counted_ratio", counted_s / CALL_CPU_S, "the same / a call's processor time", at_most=0.01)
    return report


async def _measure_scrape(page: MetricsPage) -> float:
    """Return the milliseconds of one scrape. The scrape reads everything again and uses no cached values."""
    took = list[float]()
    for _ in range(SCRAPES):
        began = time.perf_counter()
        await page.render()
        took.append((time.perf_counter() - began) * 1000)
    return median(took)


async def _own_ms(page: MetricsPage) -> float:
    began = time.process_time()
    for _ in range(SCRAPES):
        await page.render()
    return (time.process_time() - began) / SCRAPES * 1000


async def _script_times_ms(client: "redis.asyncio.Redis") -> list[float]:
    """Return how long each script of a scrape blocks Redis, in milliseconds. Commands inside the scripts are shorter
    than the listed times.
    """
    page = MetricsPage(client, DEPLOYMENT)
    await page.render()
    await client.config_set("slowlog-log-slower-than", LISTED_US)
    await client.slowlog_reset()
    await page.render()
    entries: Any = await client.slowlog_get(MAX_LISTED)
    return [entry["duration"] / 1000 for entry in entries if entry["command"].startswith(b"EVALSHA ")]


async def _fill(client: "redis.asyncio.Redis") -> None:
    await _fill_hosts(client)
    await _fill_tenants(client)
    tally = Tally(client, DEPLOYMENT)
    for number in range(TOOLS):
        for code in ("", *ErrorCode):
            tally.counts.count(CALLS, f"tool_{number}", "error" if code else "ok", code)
        for value in (0.001, 0.05, 3.0, 1000.0):
            tally.counts.observe(CALL_SECONDS, value, f"tool_{number}")
    await tally.flush()


async def _fill_tenants(client: "redis.asyncio.Redis") -> None:
    admission, now = admission_prefix(DEPLOYMENT), time.time()
    async with client.pipeline(transaction=False) as pipe:
        for number in range(TENANTS):
            pipe.hset(tenants_key(DEPLOYMENT), f"tenant-{number}", TenantPolicy().model_dump_json())
            pipe.hset(f"{admission}tenant:tenant-{number}", mapping={"held": number % 7, "weight": 1})
        await pipe.execute()
    step = load_script()
    for begin in range(0, WAITING, ASKED_AT_ONCE):
        operations = [_ask(number) for number in range(begin, begin + ASKED_AT_ONCE)]
        # The host is unknown, so it has few slots. All of them are in use, and every message waits.
        await step.run(client, **script_arguments(DEPLOYMENT, "o", operations, now=now - WAITING + begin))


def _ask(number: int) -> Operation:
    request = SlotRequest(
        tenant=f"tenant-{number % TENANTS}",
        policy=TenantPolicy(),
        queue=f"host.h{number % HOSTS}.b",
        call_id=f"c{number}",
        tool="bash_tool",
        priority="interactive",
        wait_s=3600.0,
        limit_s=60.0,
    )
    return enqueue(f"o.{number}", request)


async def _fill_hosts(client: "redis.asyncio.Redis") -> None:
    gauges = json.dumps({"sandboxes": {"busy": 3, "idle": 9, "warm": 4}, "warm_target": 4})
    async with client.pipeline(transaction=False) as pipe:
        for number in range(HOSTS):
            queue = f"host.h{number}.b"
            report = HostReport(
                host=f"h{number}", queue=queue, worker="w", kind="sandbox", slots=8, started_at=0.0, reported_at=0.0
            )
            pipe.set(host_key(DEPLOYMENT, queue), report.model_dump_json())
            pipe.set(host_gauges_key(DEPLOYMENT, queue), gauges)
            pipe.zadd(hosts_key(DEPLOYMENT), {queue: time.time()})
            pipe.hset(f"{admission_prefix(DEPLOYMENT)}queue:{queue}", "held", 8)
        for number in range(MESSAGES):
            key = call_key(DEPLOYMENT, f"tenant-{number % TENANTS}", f"c{number}")
            body = base64.b64encode(b"x" * 1500).decode()
            message = {
                "body": body,
                "headers": {"task": "tool.bash_tool", "id": "x", "call_key": key, "call_attempt": 1},
                "properties": {},
            }
            pipe.hset(key, mapping={"state": "queued", "queued_at": time.time()})
            pipe.lpush(f"host.h{number % HOSTS}.b", json.dumps(message))
        await pipe.execute()


def _counted_s() -> float:
    """Return the CPU seconds of counting one call whose series already exist."""
    meter = CallMeter(Counts())
    meter.tools_changed((ToolSpec(name="bash_tool", description="x", parameters={"type": "object", "properties": {}}),))
    clocks = Clocks(queued_s=0.01, sandbox_s=0.02, run_s=0.3, transfer_s=0.004)
    result = ToolResult(call_id="c1", name="bash_tool", success=True, output="x" * 2000, clocks=clocks)
    meter.count(result)
    began = time.process_time()
    for _ in range(CALLS_MADE):
        meter.count(result)
    return (time.process_time() - began) / CALLS_MADE
