"""What tracing costs a call: the hook while it is off, by itself; and on beside off, through the whole path of one
embedded stack.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.loop_step import quiet_log
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.whole_path import awaited
from contract.calls import ToolCall, ToolContext, ToolResult
from contract.envelope import decode_call, encode_result
from contract.signing import ResultSeal, SigningKeys
from contract.specs import ToolSpec
from orchestrator import ToolClient
from orchestrator.dispatch.dispatcher import Dispatcher, Route
from orchestrator.dispatch.sessions import Session
from orchestrator.dispatch.transport import Delivery
from tests.otlp_collector import open_collector

HOOK_CALLS, HOOK_ROUNDS = size((200, 40), (5, 2))
CALLS, ROUNDS, WARM_UP = size((10, 40, 5), (20, 2, 1))
"""The smallest size still uses several ticks of the processor clock: ratios need more than none."""
KEYS = SigningKeys.of("a benchmark's secret")
SPEC = ToolSpec(
    name="echo",
    description="Gives back its text.",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
    pool="web",
)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDS = itertools.count()


class _Catalog:
    async def specs(self) -> tuple[ToolSpec, ...]:
        return (SPEC,)

    def explain_missing(self, name: str) -> str | None:
        return None


class _Worker:
    """A transport whose worker answers at once."""

    async def deliver(self, delivery: Delivery) -> Any:
        call, context = decode_call(delivery.envelope, KEYS)
        return encode_result(_answer(call, context), seal=ResultSeal(KEYS, context.tenant, context.attempt))

    def settle(self, tenant: str, call_id: str) -> None:
        """Nothing is kept."""

    async def command(self, queue: str, envelope: str) -> None:
        """Nobody is told."""

    async def aclose(self) -> None:
        """Nothing is open."""


def _answer(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="x" * 100)


class _Hookless(Dispatcher):
    """Without the hook that every call passes while tracing is off."""

    async def _traced(
        self, call: ToolCall, route: Route, work: Awaitable[ToolResult], run: str | None = None
    ) -> ToolResult:
        return await work


async def _dispatched(door: Dispatcher) -> float:
    """CPU seconds a call."""
    began = time.process_time()
    for _ in range(HOOK_CALLS):
        result = await door.dispatch(
            ToolCall(id=f"c{next(_IDS)}", name="echo", arguments={"text": "some text"}), Route("acme", "s", "q")
        )
        if not result.success:
            raise RuntimeError(f"the call did not succeed: {result.text()}")
    return (time.process_time() - began) / HOOK_CALLS


async def _called(session: Session) -> None:
    for _ in range(CALLS):
        result = await session.call("bash_tool", {"command": "true"})
        if not result.success:
            raise RuntimeError(f"the call did not succeed: {result.text()}")


def _cpu_s(pids: Iterable[int]) -> float:
    """Of processes and of their children that have ended."""
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


async def _through_all(report: Report) -> float:
    """Calls of two clients of one stack, of which only one has its calls traced, in turn. Gives the seconds of one that
    is not.
    """
    async with contextlib.AsyncExitStack() as stack:
        collector = stack.enter_context(open_collector())
        with environment(collector.environment()):
            traced = await stack.enter_async_context(ToolClient.embedded())
        assert traced.stack is not None
        plain = await stack.enter_async_context(ToolClient.connect(traced.stack.redis_url))
        clients = {"off": plain, "on": traced}
        sessions = {
            name: await stack.enter_async_context(await client.open_session()) for name, client in clients.items()
        }
        pids = [os.getpid(), *traced.stack.pids["worker"]]
        cpu: dict[str, list[float]] = {name: [] for name in clients}

        def case(name: str) -> Any:
            timed = awaited(lambda: _called(sessions[name]))

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
    return median(seconds["off"]) / CALLS


async def _measure() -> Report:
    doors: dict[str, Dispatcher] = {
        "hookless": _Hookless(_Worker(), _Catalog(), KEYS, queue_wait_s=60),
        "hooked": Dispatcher(_Worker(), _Catalog(), KEYS, queue_wait_s=60),
    }
    seconds = await interleave(
        {name: lambda door=door: _dispatched(door) for name, door in doors.items()}, HOOK_ROUNDS, warm_up=3
    )
    hookless, hooked = median(seconds["hookless"]), median(seconds["hooked"])
    report = Report("tracing")
    report.add("hook_ms", (hooked - hookless) * 1000, "off: CPU of the hook in a dispatcher's call")
    off_s = await _through_all(report)
    report.add(
        "off_ratio",
        1 + (hooked - hookless) / off_s,
        "off: a call through the whole path with the hook / without",
        at_most=1.01,
    )
    return report


def run() -> Report:
    with quiet_log():
        return asyncio.run(_measure())
