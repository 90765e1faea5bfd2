"""Measure a report of a month with a million calls, and what measuring and counting adds to a call."""

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any

from benchmarks.report import Report, interleave, median
from benchmarks.sandboxes import FOLDERS, find_own
from benchmarks.sizes import size
from benchmarks.whole_path import awaited, whole_call
from toolcrew import ToolClient
from toolcrew.contract.calls import SessionUsage
from toolcrew.contract.settings import load_settings
from toolcrew.store.call_scripts import FINISH
from toolcrew.store.calls import FinishedCalls
from toolcrew.store.connection import SyncRedis, connect, open_redis
from toolcrew.store.scripts import Script, WorkerScript
from toolcrew.store.usage import AMOUNTS, DAY_S, USAGE_LUA, CallEnding, UsageStore, pack_amounts, sum_rows, usage_prefix
from toolcrew.workers.sandboxd.metering import SandboxMeter, UsageReader, UsageTotals

CALLS, DAYS = 1_000_000, 31
ROUNDS = size(200, 2)
WARM_UP = size(20, 1)
MEASURED = size(2000, 20)
REPORT_MS = 5000.0
_COUNT_NOTHING = """
local usage_time = redis.call('TIME')
local function count_usage() end
local function change_stored() return 0 end
"""
SHARE = 0.01
"""Highest part of a call's time that measuring and counting may take."""


def run() -> Report:
    return asyncio.run(_run())


async def _run() -> Report:
    report = Report("usage_report", notes=[f"{CALLS} calls in {DAYS} days of 24 hours with every amount"])
    async with ToolClient.embedded(workers_only=True) as client, await client.open_session() as session:
        assert client.stack is not None
        broker = load_settings().broker(client.stack.redis_url)
        redis = open_redis(broker)
        try:
            first = int(time.time() // DAY_S) - DAYS + 1
            await _fill(redis, broker.deployment, first)
            store = UsageStore(redis, broker.deployment)
            for by in ("day", "hour"):
                began = time.perf_counter()
                rows = await store.read(
                    "bench", first * DAY_S, (first + DAYS) * DAY_S, "hour" if by == "hour" else "day"
                )
                shown = [row.to_json() for row in rows]
                report.add(
                    f"{by}_ms", (time.perf_counter() - began) * 1000, f"by {by}: {len(shown)} rows", at_most=REPORT_MS
                )
                assert sum_rows(rows)["calls"] == CALLS // (DAYS * 24) * DAYS * 24
        finally:
            await redis.aclose()
        seconds = await interleave({"call": awaited(lambda: whole_call(session))}, ROUNDS, WARM_UP)
        call_s = median(seconds["call"])
        info = await session.info()
        assert info.sandbox is not None
        found = find_own(info.sandbox.id)
        assert found is not None, "the embedded stack starts sandboxes by the engine: run it as root"
        process = int((FOLDERS / found / "pid").read_text(encoding="ascii"))
        measured_s = _measure(UsageReader(found, process))
        plain_s, counted_s = _store(connect(broker), broker.deployment)
    added_s = measured_s + max(0.0, counted_s - plain_s)
    report.add("call_ms", call_s * 1000, "bash_tool true through the whole stack")
    report.add("measured_ms", measured_s * 1000, "reading the counters before and after a call")
    report.add("stored_ms", plain_s * 1000, "storing a result by a script that counts nothing")
    report.add("counted_ms", counted_s * 1000, "storing a result and counting its usage")
    report.add("added_ratio", added_s / call_s, "all of it / the call", at_most=SHARE)
    return report


async def _fill(redis: Any, deployment: str, first: int) -> None:
    """Write the records that the scripts of the store write for a month of calls. The number of calls changes only the
    values in the records and not their number.
    """
    hourly = CALLS // (DAYS * 24)
    for day in range(first, first + DAYS):
        hours = dict.fromkeys(range(24), pack_amounts(dict.fromkeys(AMOUNTS, hourly)))
        await redis.hset(f"{usage_prefix(deployment, 'bench')}{day}", mapping=hours)


def _measure(reader: UsageReader) -> float:
    """Return the seconds that the meter of a sandbox takes for one call."""
    meter = SandboxMeter(reader)
    meter.bill(UsageTotals())
    began = time.perf_counter()
    for _ in range(MEASURED):
        meter.end(meter.begin())
    return (time.perf_counter() - began) / MEASURED


def _store(client: SyncRedis, deployment: str) -> tuple[float, float]:
    """Return the medians of storing a result without and with counting its usage, from interleaved rounds."""
    finished, quiet = FinishedCalls(client), FinishedCalls(client)
    source = FINISH.source.replace(USAGE_LUA, _COUNT_NOTHING)
    quiet._finish = WorkerScript(client, Script(source, keys=FINISH.keys, args=FINISH.args))
    plain, counted = list[float](), list[float]()
    for number in range(MEASURED):
        usage = SessionUsage(meter="m", cpu_s=number / 100, sandbox_s=number / 10, written_bytes=number * 4096)
        ending = CallEnding(
            deployment=deployment,
            tenant="bench",
            call="",
            attempt=1,
            code="",
            sandbox="box",
            session="s1",
            stored=None,
            usage=usage,
        )
        for took, store in ((plain, quiet), (counted, finished)):
            one = replace(ending, call=secrets.token_hex(8))
            began = time.perf_counter()
            store.store(f"bench-{number}", "{}", 60, one)
            took.append(time.perf_counter() - began)
    return median(plain), median(counted)
