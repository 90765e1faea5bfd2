"""Rounds of chaos on one harness: load, a fault at a random moment, and load again. At the end everything is checked."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from docker import APIClient

from tests.chaos.blows import Blow, Struck, strike
from tests.chaos.leftovers import find_leftovers, find_mounts
from tests.chaos.load import Load, open_load
from tests.chaos.usage import judge_usage, read_usage
from tests.chaos.verdict import Verdict, count_acts, judge, read_lines
from tests.support.stack.host_harness import Harness, open_harness
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import OperatorError, ToolFailure
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.sdk.client import ToolClient

SETTLE_S = 90.0
"""Limit for the leftovers of killed processes to disappear, in seconds: times to live, leases, reports, and a retry."""


@dataclass(frozen=True)
class Terms:
    """Parameters of rounds. `moments_s`: time between two faults. The load comes from `drivers` x `sessions`."""

    drivers: int = 2
    sessions: int = 5
    moments_s: tuple[float, float] = (1.0, 4.0)
    pause_s: tuple[float, float] = (5.0, 20.0)
    has_tools: bool = True


@dataclass
class Report:
    """The result of rounds. `wrong` is empty if all checks passed."""

    struck: list[tuple[Blow, Struck]] = field(default_factory=list)
    verdict: Verdict | None = None
    wrong: list[str] = field(default_factory=list)
    settled_s: float = 0.0


@contextmanager
def open_chaos(api: APIClient, terms: Terms) -> Iterator[Harness]:
    """Open two hosts and a worker for operators' tools. Leftovers at the end fail the block."""
    settings = {"TOOLCREW_QUEUE_WAIT_S": "20", "TOOLCREW_CHECKPOINT_EVERY_S": "2"}
    with open_harness(api, "a", "b", settings=settings, tools=terms.has_tools) as harness:
        yield harness
        harness.stop()
        harness.footprint.assert_nothing_left(within_s=30)
        leftovers = find_mounts(harness.folder)
        assert not leftovers, f"left behind: {leftovers}"


def play(
    harness: Harness, blows: Sequence[Blow], terms: Terms, seed: str, say: Callable[[str], None] = lambda _: None
) -> Report:
    """Apply one fault after another under load, then check everything."""
    chance, report = random.Random(seed), Report()
    with open_load(
        harness, drivers=terms.drivers, sessions=terms.sessions, seed=seed, has_tools=terms.has_tools
    ) as load:
        load.wait_busy()
        for blow in blows:
            time.sleep(chance.uniform(*terms.moments_s))
            struck = strike(blow, harness, load, chance, terms.pause_s)
            report.struck.append((blow, struck))
            say(f"{blow}: {struck}")
        # Load after the last fault shows whether the system works again.
        time.sleep(terms.moments_s[1])
        report.wrong += load.end()
        harness.has_orphans |= bool(load.killed())
        report.settled_s = settle(harness, report.wrong)
        lines = [line for driver in load.drivers if driver.out.exists() for line in read_lines(driver.out)]
        report.verdict = _judge(harness, load, lines)
        with harness.open_redis() as client:
            report.wrong += judge_usage(read_usage(client, harness.deployment), lines)
    report.wrong += report.verdict.wrong
    return report


def _judge(harness: Harness, load: Load, lines: Sequence[Mapping[str, Any]]) -> Verdict:
    names = tuple(f"{driver.name}-" for driver in load.drivers)
    acts = {call: count for call, count in count_acts(harness.tally).items() if call.startswith(names)}
    return judge(lines, acts, load.killed())


def settle(harness: Harness, wrong: list[str]) -> float:
    """Return the seconds until no call and no session was left. Leftovers at the deadline are added to `wrong`."""
    started = time.monotonic()
    leftovers: dict[str, Any] = {}
    while time.monotonic() - started < SETTLE_S:
        # A new session must be served, and its opening removes the leftovers of killed processes.
        unserved = asyncio.run(_try_call(harness))
        leftovers = find_leftovers(harness) | ({"unserved": unserved} if unserved else {})
        if not leftovers:
            return time.monotonic() - started
        time.sleep(0.5)
    wrong.append(f"left {SETTLE_S:g} s after the last orchestrator ended: {leftovers}")
    return SETTLE_S


async def _try_call(harness: Harness) -> str | None:
    """Return the error that a new program receives, or None if its call succeeds."""
    settings = OrchestratorSettings.model_validate({"redis_url": harness.redis_url, "deployment": harness.deployment})
    try:
        async with (
            asyncio.timeout(SOON_S),
            ToolClient.connect(settings=settings) as client,
            await client.open_session(ttl_s=5) as session,
        ):
            result = await session.call("bash_tool", {"command": "echo on"}, timeout_s=5)
            return None if result.success else result.error
    except (OperatorError, ToolFailure, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
