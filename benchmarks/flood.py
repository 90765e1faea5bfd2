"""Measure how long ten calls of 10 ms wait behind 2,000 calls of another tenant, through the whole path.

The path has two orchestrators, a real Redis server and Celery workers on prefork.
"""

import asyncio
import contextlib
import time

from benchmarks.noop_worker import NAP_S, NAP_TOOL
from benchmarks.raw_celery import running_tools
from benchmarks.report import Report, median
from benchmarks.sizes import size
from benchmarks.throughput import call_or_raise, until_served
from toolcrew import ToolClient
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants

SLOTS = 4
FLOOD = size(2000, 200)
FEW = size(10, 2)
ROUNDS = size(5, 1)
LEAD_S = size(2.0, 0.2)
"""Head start of the flood, in seconds. In a first-in, first-out queue the few calls would wait for the whole flood."""


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    async with contextlib.AsyncExitStack() as stack:
        flooder = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert flooder.stack is not None
        url = flooder.stack.redis_url
        settings = load_settings()
        connection = open_redis(settings.broker(url))
        stack.push_async_callback(connection.aclose)
        tenants = RedisTenants(connection, settings.broker(url).deployment, settings.broker(url).signing_keys())
        for name in ("many", "few"):
            await tenants.add(name, TenantPolicy())
        stack.enter_context(running_tools(url, SLOTS))
        few = await stack.enter_async_context(ToolClient.connect(url, tenant="few"))
        flooding = await stack.enter_async_context(await flooder.open_session(tenant="many"))
        waiting = await stack.enter_async_context(await few.open_session())
        await until_served(lambda _: call_or_raise(flooding, NAP_TOOL, {}))
        alone = [await _ends(waiting) for _ in range(rounds)]
        behind = [await _behind(flooding, waiting) for _ in range(rounds)]
    return _report(alone, behind, rounds)


async def _behind(flooding: Session, waiting: Session) -> tuple[float, float]:
    """Return the seconds until the few calls end, and the seconds that the whole flood would take at its measured
    rate.

    The few calls arrive while the flood is in the queue.
    """
    flood = [asyncio.create_task(call_or_raise(flooding, NAP_TOOL, {})) for _ in range(FLOOD)]
    await asyncio.sleep(LEAD_S)
    done, came = sum(task.done() for task in flood), time.perf_counter()
    took = await _ends(waiting)
    await asyncio.gather(*flood)
    rest_s = time.perf_counter() - came
    if done == FLOOD:
        raise RuntimeError(f"the flood was over after {LEAD_S:g} s: nothing was measured")
    return took, rest_s


async def _ends(session: Session) -> float:
    """Make the few calls at once and return the seconds until the last call ends."""
    came = time.perf_counter()
    await asyncio.gather(*(call_or_raise(session, NAP_TOOL, {}) for _ in range(FEW)))
    return time.perf_counter() - came


def _report(alone: list[float], behind: list[tuple[float, float]], rounds: int) -> Report:
    note = (
        f"medians of {rounds} rounds; {FEW} calls of {NAP_S * 1000:g} ms behind {FLOOD}, {SLOTS} slots on prefork, "
        "both orchestrators in one process"
    )
    report = Report("flood", notes=[note])
    took = median([few for few, _ in behind])
    report.add("few_alone_ms", median(alone) * 1000, "the last of the few is done, on an idle pool")
    report.add("few_behind_ms", took * 1000, "the last of the few is done, behind the flood", at_most=300)
    report.add(
        "flood_ms",
        median([rest for _, rest in behind]) * 1000,
        "the flood is done: what the few would wait for in one queue",
    )
    report.add("few_ratio", took / median([rest for _, rest in behind]), "behind the flood / in one queue")
    return report
