"""Measure how admission shares the four slots of one queue between tenants, and the cost of a call.

Redis is real. The workers only sleep.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import redis.asyncio

from benchmarks.report import Report, median
from benchmarks.sizes import size
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import slots_key
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config
from toolcrew.store.slots import SlotRequest

QUEUE = "host.bench.1"
SLOTS = 4
FLOOD = size(2000, 60)
FEW = 10
SHARE_S = size(60.0, 2.0)
ROUNDS = size(5, 1)
CALLS = size(2000, 50)
"""Number of calls of one size in one round."""
LONG_S = size(60.0, 1.0)


class SimulatedPool:
    """Separate Redis server, two orchestrators, and four workers that run the admitted calls in order."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.admissions = (SharedAdmission(client, "bench"), SharedAdmission(client, "bench"))
        self.workers = asyncio.Semaphore(SLOTS)
        self.used: defaultdict[str, float] = defaultdict(float)

    async def call(
        self, tenant: str, seconds: float, by: int = 0, policy: TenantPolicy | None = None, wait_s: float = 600.0
    ) -> None:
        async with self.admissions[by].slot(build_request(tenant, policy, wait_s)) as slot, self.workers:
            started = time.perf_counter()
            await asyncio.sleep(seconds)
            slot.used_s = time.perf_counter() - started
            self.used[tenant] += slot.used_s

    async def set_slots(self, slots: int) -> None:
        await self.client.set(slots_key("bench", QUEUE), slots)


def build_request(tenant: str, policy: TenantPolicy | None = None, wait_s: float = 600.0) -> SlotRequest:
    return SlotRequest(
        tenant=tenant,
        policy=policy or TenantPolicy(),
        queue=QUEUE,
        call_id="c",
        tool="bash_tool",
        priority="interactive",
        wait_s=wait_s,
        limit_s=120.0,
    )


def run(share_s: float = SHARE_S) -> Report:
    return asyncio.run(_run(share_s))


async def _run(share_s: float) -> Report:
    report = Report(
        "fairness",
        notes=[
            (
                f"{SLOTS} slots, two orchestrators, workers that sleep; costs: medians of {ROUNDS} interleaved rounds "
                f"of {CALLS}"
            )
        ],
    )
    first, last = await _few_behind_a_flood()
    report.add(
        "few_first_ms", first * 1000, f"{FEW} calls behind {FLOOD} of another tenant, 10 ms each: the first is done"
    )
    report.add("few_last_ms", last * 1000, "the last is done; in one queue about 5,000 ms", at_most=300)
    share = await _measure_share(share_s)
    report.add(
        "weight_3_share_ratio",
        share,
        f"share of weight 3 next to weight 1, {share_s:g} s of 20 ms calls",
        at_least=0.7125,
    )
    report.add("weight_3_off_ratio", abs(share - 0.75) / 0.75, "its distance from three quarters", at_most=0.05)
    held = await _long_calls()
    report.add(
        "long_held_ratio",
        held / SLOTS,
        f"of the slots, what one tenant of {LONG_S:g} s calls holds",
        at_most=(SLOTS - 1) / SLOTS,
    )
    await _costs(report)
    return report


async def _few_behind_a_flood() -> tuple[float, float]:
    """Return the seconds from the submission of tenant B's few calls until the first and until the last call has
    ended.
    """
    async with open_pool() as pool:
        flood = [asyncio.create_task(pool.call("a", 0.01)) for _ in range(FLOOD)]
        await asyncio.sleep(0.3)
        ends: list[float] = []
        came = time.perf_counter()

        async def few() -> None:
            await pool.call("b", 0.01, by=1)
            ends.append(time.perf_counter() - came)

        await asyncio.gather(*(few() for _ in range(FEW)))
        await _end(flood)
        return min(ends), max(ends)


async def _measure_share(for_s: float) -> float:
    """Return the share of the workers' seconds that the tenant of weight 3 received.

    Each tenant has 24 callers at one of the orchestrators.
    """
    async with open_pool() as pool:

        async def caller(tenant: str, by: int, policy: TenantPolicy) -> None:
            while True:
                await pool.call(tenant, 0.02, by, policy)

        callers = [
            asyncio.create_task(caller(tenant, by, TenantPolicy(weight=weight)))
            for tenant, by, weight in (("heavy", 0, 3.0), ("light", 1, 1.0))
            for _ in range(24)
        ]
        await asyncio.sleep(for_s)
        used = dict(pool.used)
        await _end(callers)
        return used["heavy"] / sum(used.values())


async def _long_calls() -> int:
    """Return the number of slots that one tenant occupies when its long calls request all slots."""
    async with open_pool() as pool:
        calls = [asyncio.create_task(pool.call("hog", LONG_S)) for _ in range(20)]
        await asyncio.sleep(3)
        await pool.call("other", 0.01, by=1, wait_s=10)
        held: Any = await pool.client.hvals("toolcrew:bench:admission:held")
        await _end(calls)
        return sum(json.loads(call)["tenant"] == "hog" for call in held)


async def _costs(report: Report) -> None:
    sizes = {"waiting_0": (50, 0, 1), "waiting_5000": (50, 5000, 1), "tenants_1000": (50, 5000, 1000)}
    labels = {
        "waiting_0": "25 callers, nobody waits",
        "waiting_5000": "the same with 5,000 waiting calls of one tenant",
        "tenants_1000": "the same with 5,000 waiting calls of 1,000 tenants",
    }
    redis_s: dict[str, list[float]] = {name: [] for name in sizes}
    rates: dict[str, list[float]] = {name: [] for name in sizes}
    for _ in range(ROUNDS):
        for name, (callers, waiting, tenants) in sizes.items():
            rate, busy = await _cost(callers, waiting, tenants)
            rates[name].append(rate)
            redis_s[name].append(busy)
    for name, label in labels.items():
        report.add(f"{name}_per_s", median(rates[name]), f"calls a second through admission alone, {label}")
    for name, label in labels.items():
        report.add(f"{name}_redis_ms", median(redis_s[name]) * 1000, f"Redis's processor time a call, {label}")
    base = median(redis_s["waiting_0"])
    report.add(
        "waiting_ratio", median(redis_s["waiting_5000"]) / base, "5,000 waiting / none, Redis's time", at_most=1.5
    )
    report.add(
        "tenants_ratio", median(redis_s["tenants_1000"]) / base, "1,000 tenants / none, Redis's time", at_most=1.5
    )


async def _cost(callers: int, waiting: int, tenants: int) -> tuple[float, float]:
    """Return calls per second, and CPU seconds of Redis per call. The waiting tenants have long calls, which leave
    slots free for the measured calls.
    """
    async with open_pool() as pool:
        await pool.set_slots(callers)
        # Admission knows that the calls of this tenant are short before long calls arrive.
        await pool.call("measured", 0.0001)
        crowd = [asyncio.create_task(pool.call(f"w{number % tenants}", LONG_S, 1)) for number in range(waiting)]
        while await pool.client.hlen("toolcrew:bench:admission:waiting") < waiting - 2 * callers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        numbers = iter(range(CALLS))

        async def caller() -> None:
            for _ in numbers:
                async with pool.admissions[0].slot(build_request("measured")) as slot:
                    slot.used_s = 0.0001

        before, started = await _processor_s(pool.client), time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers // 2)))
        took, busy = time.perf_counter() - started, await _processor_s(pool.client) - before
        await _end(crowd)
        return CALLS / took, busy / CALLS


async def _processor_s(client: "redis.asyncio.Redis") -> float:
    info: Any = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def _end(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_pool() -> AsyncIterator[SimulatedPool]:
    with open_server() as url:
        connections = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=16, timeout=10, socket_timeout=10
        )
        async with redis.asyncio.Redis(connection_pool=connections) as client:
            await until_it_answers(client)
            pool = SimulatedPool(client)
            await pool.set_slots(SLOTS)
            yield pool
            for admission in pool.admissions:
                await admission.aclose()
        await connections.disconnect()


@contextlib.contextmanager
def open_server() -> Iterator[str]:
    """Start an empty Redis server and yield its URL."""
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as folder:
        port = reserve_port()
        config = write_redis_config(Path(folder), port, "bench")
        server = subprocess.Popen(
            [find_redis_server(), str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield f"redis://:bench@127.0.0.1:{port}/0"
        finally:
            os.kill(server.pid, signal.SIGTERM)
            server.wait(20)


async def until_it_answers(client: "redis.asyncio.Redis") -> None:
    until = time.monotonic() + 20
    while True:
        try:
            await client.ping()
        except (redis.RedisError, OSError) as error:
            if time.monotonic() > until:
                raise BrokerUnavailable(
                    f"the redis-server of this benchmark did not start ({error}): is a port free on 127.0.0.1?"
                ) from error
            await asyncio.sleep(0.02)
        else:
            return
