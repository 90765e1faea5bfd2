"""Measure calls per second through the whole path, and the latency at half load.

The floor (baseline) is a no-op of a worker like toolcrew's, without admission, records and signatures. The peer is a
no-op of a Celery app as Celery's documentation shows it. Both have the same kind of pool with the same number of slots.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.noop_worker import TOOL
from benchmarks.raw_celery import open_raw, running_tools
from benchmarks.report import Report, median, percentile
from benchmarks.sizes import size
from benchmarks.stock_celery import open_stock, stock_per_second
from benchmarks.whole_path import IN_FLIGHT, open_sessions, per_second
from toolcrew import ToolClient
from toolcrew.contract.errors import ToolcrewError
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.connection import open_redis

ROUNDS = size(5, 1)
CALLS = size(300, 8)
"""Number of calls of a case in a round."""
SLOTS = size(4, 2)
PATH = "/workspace/notes.txt"
START_LIMIT_S = 30.0

Work = Callable[[int], Awaitable[object]]


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert client.stack is not None
        url = client.stack.redis_url
        connection = open_redis(load_settings().broker(url))
        stack.push_async_callback(connection.aclose)
        stack.enter_context(running_tools(url, SLOTS))
        raw_prefork = await open_raw(url, connection, stack, "prefork", SLOTS)
        raw_threads = await open_raw(url, connection, stack, "threads", SLOTS)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-"))
        stack.enter_context(open_stock(url, SLOTS, Path(folder)))
        sessions = await stack.enter_async_context(open_sessions(client))
        for session in sessions:
            await session.write_file(PATH, b"a line of text\n" * 20)

        def noop(number: int) -> Awaitable[object]:
            return call_or_raise(sessions[number % len(sessions)], TOOL, {})

        def read(number: int) -> Awaitable[object]:
            return call_or_raise(sessions[number % len(sessions)], "read_tool", {"file_path": PATH})

        await until_served(noop)
        cases: Mapping[str, Callable[[], Awaitable[float]]] = {
            "raw_prefork": lambda: per_second(lambda _: raw_prefork.by_hub(), CALLS),
            "noop": lambda: per_second(noop, CALLS),
            "stock": partial(asyncio.to_thread, stock_per_second, CALLS, IN_FLIGHT),
            "raw_threads": lambda: per_second(lambda _: raw_threads.by_hub(), CALLS),
            "read": lambda: per_second(read, CALLS),
        }
        rates = await _rates(cases, rounds)
        slow = {name: await half_load(work, median(rates[name]) / 2) for name, work in (("noop", noop), ("read", read))}
    return _report(rates, slow, rounds)


async def call_or_raise(session: Session, tool: str, arguments: dict[str, object]) -> None:
    """Make one call. Raises RuntimeError if it fails."""
    result = await session.call(tool, arguments)
    if not result.success:
        raise RuntimeError(f"the call did not succeed: {result.text()}")


async def until_served(work: Work) -> None:
    """Wait until the workers answer. Raises the last error of `work` at the deadline."""
    until = time.monotonic() + START_LIMIT_S
    while True:
        try:
            await work(0)
            return
        except (RuntimeError, ToolcrewError):
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


async def _rates(cases: Mapping[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, list[float]]:
    """Run the cases in rounds of A B C, A B C, ... and return the calls per second.

    Interleaving spreads a slowdown of the machine over all cases.
    """
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, work in cases.items():
            rate = await work()
            if number:
                rates[name].append(rate)
    return rates


async def half_load(work: Work, per_s: float) -> list[float]:
    """Return the seconds of each of CALLS calls that begin at even intervals, `per_s` calls per second. A slow call
    does not delay the start of the next call.
    """
    seconds: list[float] = []

    async def timed(number: int) -> None:
        started = time.perf_counter()
        await work(number)
        seconds.append(time.perf_counter() - started)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(CALLS):
            await asyncio.sleep(max(0.0, began + number / per_s - time.perf_counter()))
            group.create_task(timed(number))
    return seconds


def _report(rates: Mapping[str, list[float]], slow: Mapping[str, list[float]], rounds: int) -> Report:
    report = Report(
        "throughput",
        notes=[f"medians of {rounds} interleaved rounds of {CALLS} calls, {IN_FLIGHT} in flight, {SLOTS} slots each"],
    )
    rate = {name: median(values) for name, values in rates.items()}
    labels = {
        "raw_prefork": "floor: raw Celery no-op, prefork",
        "noop": "ours: a tool that does nothing, prefork",
        "stock": "peer: no-op of a stock Celery app, delay and get, prefork",
        "raw_threads": "floor: raw Celery no-op, threads",
        "read": "ours: read_tool in a sandbox, threads",
    }
    for name, label in labels.items():
        report.add(f"{name}_per_s", rate[name], label)
    # Compute the ratio within one round: a slowdown of the machine affects both cases.
    for name, ours, other, least in (
        ("noop_ratio", "noop", "raw_prefork", 0.6),
        ("stock_ratio", "noop", "stock", 1.0),
        ("read_ratio", "read", "raw_threads", 0.4),
    ):
        ratios = [mine / theirs for mine, theirs in zip(rates[ours], rates[other], strict=True)]
        report.add(name, median(ratios), f"{ours} / {labels[other]}", at_least=least)
    for name, seconds in slow.items():
        report.add(f"{name}_half_p50_ms", median(seconds) * 1000, f"{name} at half load, p50")
        report.add(f"{name}_half_p99_ms", percentile(seconds, 0.99) * 1000, f"{name} at half load, p99")
        report.add(
            f"{name}_tail_ratio",
            percentile(seconds, 0.99) / median(seconds),
            f"{name} at half load, p99 / p50",
            at_most=5.0,
        )
    return report
