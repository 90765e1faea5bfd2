"""Measure one `bash_tool true` through the whole embedded stack.

The baselines are a raw Celery no-op on the same Redis and a bare sandbox call.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from benchmarks.raw_celery import open_raw
from benchmarks.report import Case, Report, interleave, median, percentile, timed
from benchmarks.sizes import size
from benchmarks.warm_call import sandbox_call
from toolcrew import ToolClient
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.connection import open_redis
from toolcrew.workers.sandbox_client import SandboxClient

ROUNDS = size(200, 2)
WARM_UP = size(20, 1)
IN_FLIGHT = 50
CALLS = size(400, 8)
SESSIONS = 4
MARGIN_MS = 3.0
"""Time in milliseconds that the code of toolcrew between Celery and the sandbox may take."""


def awaited(work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[float]]:
    """Return a case that only runs `work`."""

    async def case() -> float:
        started = time.perf_counter()
        await work()
        return time.perf_counter() - started

    return case


async def per_second(work: Callable[[int], Awaitable[object]], calls: int) -> float:
    """Return the calls per second with IN_FLIGHT calls at a time."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await work(number)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return calls / (time.perf_counter() - started)


async def whole_call(session: Session) -> Any:
    result = await session.call("bash_tool", {"command": "true"})
    if not result.success:
        raise RuntimeError(f"the call did not succeed: {result.text()}")
    return result


@contextlib.asynccontextmanager
async def open_sessions(client: ToolClient) -> AsyncIterator[Sequence[Session]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await client.open_session()) for _ in range(SESSIONS)]


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert client.stack is not None
        connection = open_redis(load_settings().broker(client.stack.redis_url))
        stack.push_async_callback(connection.aclose)
        raw = await open_raw(client.stack.redis_url, connection, stack)
        sessions = await stack.enter_async_context(open_sessions(client))
        sandboxes = stack.enter_context(SandboxClient(client.stack.sandboxd_socket))
        name = sandboxes.open("bench", "whole")
        stack.callback(sandboxes.close, name)
        clocks: list[Any] = []

        async def ours() -> None:
            clocks.append((await whole_call(sessions[0])).clocks)

        cases: dict[str, Case] = {
            "celery_get": timed(raw.by_get),
            "celery_hub": awaited(raw.by_hub),
            "sandbox": timed(lambda: sandbox_call(sandboxes, name)),
            "ours": awaited(ours),
        }
        seconds = await interleave(cases, rounds, WARM_UP)
        raw_rate = await per_second(lambda _: raw.by_hub(), CALLS)
        rate = await per_second(lambda number: whole_call(sessions[number % SESSIONS]), CALLS)
    return _report(seconds, clocks[WARM_UP:], raw_rate, rate, rounds)


def _report(seconds: dict[str, list[float]], clocks: list[Any], raw_rate: float, rate: float, rounds: int) -> Report:
    report = Report("whole_path", notes=[f"medians of {rounds} interleaved rounds after {WARM_UP} to warm up"])
    middle = {name: median(values) * 1000 for name, values in seconds.items()}
    celery = min(middle["celery_get"], middle["celery_hub"])
    floor = celery + middle["sandbox"]
    report.add("floor_celery_get_ms", middle["celery_get"], "floor: raw Celery no-op, AsyncResult.get")
    report.add("floor_celery_hub_ms", middle["celery_hub"], "floor: raw Celery no-op, awaited by our hub")
    report.add("floor_sandbox_ms", middle["sandbox"], "floor: sandbox call, SandboxClient.call")
    report.add("ours_p50_ms", middle["ours"], "ours: Session.call, p50", at_most=floor + MARGIN_MS)
    report.add("ours_p95_ms", percentile(seconds["ours"], 0.95) * 1000, "ours: Session.call, p95")
    report.add("overhead_ms", middle["ours"] - floor, "ours - (faster Celery + sandbox call)", at_most=MARGIN_MS)
    report.add("floor_ratio", middle["ours"] / floor, "ours / (faster Celery + sandbox call)")
    for clock in ("queued_s", "sandbox_s", "run_s", "transfer_s"):
        value = median([getattr(entry, clock) for entry in clocks]) * 1000
        report.add(f"clock_{clock.removesuffix('_s')}_ms", value, f"split: the result's clock {clock}")
    report.add("floor_celery_per_s", raw_rate, f"floor: raw Celery no-ops, {IN_FLIGHT} in flight")
    report.add("ours_per_s", rate, f"ours: {IN_FLIGHT} in flight over {SESSIONS} sessions")
    report.add("throughput_ratio", rate / raw_rate, "ours / raw Celery")
    return report
