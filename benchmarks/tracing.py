"""Measure what tracing costs a call, through the whole path of one embedded stack.

Tracing on is compared with tracing off, in which the dispatcher has no middleware for tracing.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.loop_step import quiet_log
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.whole_path import awaited
from tests.support.stack.otlp_collector import open_collector
from toolcrew import ToolClient
from toolcrew.orchestrator.dispatch.sessions import Session

CALLS, ROUNDS, WARM_UP = size((10, 40, 5), (20, 2, 1))
"""Number of calls, rounds and warm-up rounds. The smallest size still uses several ticks of the CPU clock, because a
ratio needs values above zero.
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


async def _call(session: Session) -> None:
    for _ in range(CALLS):
        result = await session.call("bash_tool", {"command": "true"})
        if not result.success:
            raise RuntimeError(f"the call did not succeed: {result.text()}")


def _cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of processes and of their ended children."""
    total = 0.0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) * TICK_S
    return total


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _measure() -> Report:
    """Measure the calls of two clients of one stack in turn. Only one of the clients traces its calls."""
    report = Report("tracing")
    async with contextlib.AsyncExitStack() as stack:
        collector = stack.enter_context(open_collector())
        with environment(collector.environment()):
            traced = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        assert traced.stack is not None
        plain = await stack.enter_async_context(ToolClient.connect(traced.stack.redis_url))
        clients = {"off": plain, "on": traced}
        sessions = {
            name: await stack.enter_async_context(await client.open_session()) for name, client in clients.items()
        }
        pids = [os.getpid(), *traced.stack.pids["worker"]]
        cpu: dict[str, list[float]] = {name: [] for name in clients}

        def case(name: str) -> Any:
            timed = awaited(lambda: _call(sessions[name]))

            async def counted() -> float:
                before = _cpu_s(pids)
                took = await timed()
                cpu[name].append(_cpu_s(pids) - before)
                return took

            return counted

        seconds = await interleave({name: case(name) for name in clients}, ROUNDS, WARM_UP)
    for name in clients:
        report.add(f"{name}_ms", median(seconds[name]) / CALLS * 1000, f"a call through the whole path, {name}")
    used = {name: sum(values[WARM_UP:]) / (ROUNDS * CALLS) for name, values in cpu.items()}
    for name, value in used.items():
        report.add(f"{name}_cpu_ms", value * 1000, f"its CPU in orchestrator and worker, {name}")
    report.add("on_ratio", median(seconds["on"]) / median(seconds["off"]), "a call, on / off", at_most=1.05)
    report.add("on_cpu_ratio", used["on"] / used["off"], "its CPU, the sending of spans included, on / off")
    report.notes.append(
        f"{ROUNDS} interleaved rounds of {CALLS} calls; {len(collector.spans)} spans sent; the collector is in the "
        "same process"
    )
    return report


def run() -> Report:
    with quiet_log():
        return asyncio.run(_measure())
