"""A fresh sandbox: create, attach, start, hello; through sandboxd, and by the docker SDK alone with the same container."""

import asyncio
import contextlib
import itertools
import time

import docker

from benchmarks.engine_peer import open_api, raw_container, sandbox_config
from benchmarks.processes import running_sandboxd
from benchmarks.report import Report, interleave, median
from workers.sandbox_client import SandboxClient

ROUNDS = 25
WARM_UP = 2
SETTLE_S = 0.3
"""The engine still clears away after a removal; the other's start is not to pay for it."""


def run(rounds: int = ROUNDS) -> Report:
    config = sandbox_config()
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        api: docker.APIClient = open_api()
        stack.callback(api.close)

        def raw() -> float:
            started = time.perf_counter()
            with raw_container(api, config):
                took = time.perf_counter() - started
            time.sleep(SETTLE_S)
            return took

        def ours() -> float:
            started = time.perf_counter()
            name = client.open("bench", f"cold-{next(numbers)}")
            took = time.perf_counter() - started
            client.close(name)
            time.sleep(SETTLE_S)
            return took

        seconds = asyncio.run(interleave({"raw": raw, "ours": ours}, rounds, WARM_UP))
    report = Report("cold_session", notes=[f"medians of {rounds} interleaved rounds after {WARM_UP}; the removal is not timed"])
    report.add_ms("floor_docker_sdk", seconds["raw"], "floor: docker SDK create + attach + start + first byte")
    report.add_ms("ours", seconds["ours"], "ours: SandboxClient.open")
    report.add("docker_sdk_ratio", median(seconds["ours"]) / median(seconds["raw"]), "ours / docker SDK", at_most=1.25)
    return report
