"""Measure the start of a session for each kind of workspace.

The first call from the warm pool is compared with a warm call. A cold open is compared with the Docker SDK.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import docker

from benchmarks.engine_peer import open_api, raw_container, sandbox_config
from benchmarks.processes import RunningSandboxd, running_sandboxd
from benchmarks.report import Case, Report, interleave, median, percentile, timed
from benchmarks.sizes import size
from benchmarks.warm_call import sandbox_call
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import SandboxClient

ROUNDS = size(25, 1)
WARM_UP = size(2, 1)
SETTLE_S = 0.3
"""Pause after a removal, in seconds. The engine still cleans up, which must not slow the next start down."""
POOL = 2
KINDS = ("tmpfs", "image")


def run(rounds: int = ROUNDS) -> Report:
    config = sandbox_config()
    notes = [
        (
            f"medians of {rounds} interleaved rounds after {WARM_UP}; removals are not timed; the pool begins to "
            "refill during each first call"
        )
    ]
    with contextlib.ExitStack() as stack:
        api = open_api()
        stack.callback(api.close)
        cases: dict[str, Case] = {"raw": _raw_case(api, config)}
        kinds = []
        for kind in KINDS:
            try:
                cases |= _cases_of(stack, kind)
                kinds.append(kind)
            except SandboxUnavailable as error:
                notes.append(f"no {kind} workspaces: {error}")
        seconds = asyncio.run(interleave(cases, rounds, WARM_UP))
    report = Report("session_start", notes=notes)
    report.add_ms("floor_docker_sdk", seconds["raw"], "floor: docker SDK create + attach + start + first byte")
    for kind in kinds:
        _add(report, kind, {name: seconds[f"{kind}_{name}"] for name in ("cold", "first", "warm")}, seconds["raw"])
    return report


def _add(report: Report, kind: str, seconds: dict[str, list[float]], raw: list[float]) -> None:
    report.add_ms(f"{kind}_cold", seconds["cold"], f"{kind}: open without a pool")
    report.add(
        f"{kind}_docker_sdk_ratio",
        median(seconds["cold"]) / median(raw),
        f"{kind}: open without a pool / docker SDK",
        at_most=1.25,
    )
    report.add_ms(f"{kind}_warm", seconds["warm"], f"{kind}: a warm call")
    report.add_ms(f"{kind}_first", seconds["first"], f"{kind}: open from the pool and the first call")
    report.add(f"{kind}_first_p95_ms", percentile(seconds["first"], 0.95) * 1000, f"{kind}: the same, p95")
    more_s = median(seconds["first"]) - median(seconds["warm"])
    report.add(f"{kind}_first_more_ms", more_s * 1000, f"{kind}: first call - warm call", at_most=60.0)


def _cases_of(stack: contextlib.ExitStack, kind: str) -> dict[str, Case]:
    """Start two sandboxds with workspaces of that kind, one of them with a pool, and return the cases. Raises
    SandboxUnavailable when this host does not support the kind.
    """
    settings = {"TOOLCREW_SANDBOX_WORKSPACE": kind}
    without = _client(stack, stack.enter_context(running_sandboxd(settings)))
    _check_kind(without, kind)
    pooled = _client(
        stack,
        stack.enter_context(running_sandboxd({**settings, "TOOLCREW_POOL_SIZE": str(POOL)})),
    )
    name = pooled.open("bench", "warm")
    return {
        f"{kind}_cold": _open_case(without, lambda: None, lambda _name: None),
        f"{kind}_first": _open_case(pooled, lambda: _wait_filled(pooled), lambda name: sandbox_call(pooled, name)),
        f"{kind}_warm": timed(lambda: sandbox_call(pooled, name)),
    }


def _client(stack: contextlib.ExitStack, sandboxd: RunningSandboxd) -> SandboxClient:
    return stack.enter_context(SandboxClient(sandboxd.socket))


def _check_kind(client: SandboxClient, kind: str) -> None:
    found = client.status()["workspaces"]
    if found["kind"] != kind:
        raise SandboxUnavailable(f"sandboxd gives {found['kind']} ({found['note']})")


def _wait_filled(client: SandboxClient) -> None:
    while client.status()["pool"]["ready"] < POOL:
        time.sleep(0.02)
    time.sleep(SETTLE_S)


def _open_case(client: SandboxClient, prepare: Callable[[], None], use: Callable[[str], None]) -> Case:
    """Return a case that opens a session and calls `use`. The times of `prepare` and of closing are not counted."""
    numbers = itertools.count()

    def case() -> float:
        prepare()
        started = time.perf_counter()
        name = client.open("bench", f"start-{next(numbers)}")
        use(name)
        took = time.perf_counter() - started
        client.close(name)
        time.sleep(SETTLE_S)
        return took

    return case


def _raw_case(api: docker.APIClient, config: Mapping[str, Any]) -> Case:
    def case() -> float:
        started = time.perf_counter()
        with raw_container(api, config):
            took = time.perf_counter() - started
        time.sleep(SETTLE_S)
        return took

    return case
