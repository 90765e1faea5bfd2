"""Check this host and its deployment, and name the remedy of each problem: engine, sandboxes, Redis, workers, model."""

import asyncio
import json
import platform
from contextlib import suppress
from typing import Literal

from toolcrew.contract.errors import BrokerUnavailable, OperatorError
from toolcrew.contract.image_names import advise_missing
from toolcrew.contract.programs import program
from toolcrew.contract.settings import OrchestratorSettings, child_environment
from toolcrew.orchestrator.operations.command_actor import find_actor
from toolcrew.orchestrator.operations.doctor_deep import examine_hosts
from toolcrew.orchestrator.operations.doctor_links import (
    examine_model,
    examine_model_endpoints,
    examine_pages,
    examine_tracing,
)
from toolcrew.orchestrator.operations.doctor_pool import examine_pool
from toolcrew.orchestrator.operations.doctor_redis import examine_redis
from toolcrew.orchestrator.operations.doctor_streams import examine_streams
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.orchestrator.operations.redis_server import find_redis_server
from toolcrew.store.connection import open_redis

Scope = Literal["all", "host", "deployment"]
CHECK_TIMEOUT_S = 60.0
CHECK_END_S = 10.0
"""Time that a cancelled check has to remove its sandbox and folders, in seconds."""


async def examine(settings: OrchestratorSettings, scope: Scope = "all", *, is_deep: bool = False) -> Report:
    """Run all checks once. The check of this host starts and removes one sandbox to test its security profile.
    `is_deep`: also make a call on each host of the deployment.

    Raises ToolFailure when the deployment is to be checked and TOOLCREW_API_KEY is not an operator's.
    """
    report = Report()
    if scope != "deployment":
        report.add("python", True, platform.python_version())
        await _examine_engine(report)
    if scope != "host":
        await _examine_deployment(settings, report, is_deep=is_deep)
        await examine_pages(settings, report)
    await examine_model(settings, report)
    await examine_tracing(settings, report)
    return report


async def _examine_deployment(settings: OrchestratorSettings, report: Report, *, is_deep: bool) -> None:
    try:
        if settings.redis_url is None:
            report.add("redis", True, f"TOOLCREW_REDIS_URL is not set; embedded stacks use {find_redis_server()}")
            return
        broker = settings.broker()
        client = open_redis(broker)
        try:
            with suppress(BrokerUnavailable):  # examine_redis reports it
                await find_actor(client, settings, "operator")
            if await examine_redis(client, broker, report):
                keys = broker.signing_keys()
                hosts = await examine_pool(client, broker.deployment, keys, report)
                await examine_streams(client, broker.deployment, keys, hosts, report)
                await examine_model_endpoints(client, broker.deployment, keys, report)
                if is_deep:
                    await examine_hosts(broker, hosts, report)
        finally:
            await client.aclose()
    except OperatorError as error:
        report.add("redis", False, str(error))


async def _examine_engine(report: Report) -> None:
    """Run sandboxd's own check in a separate process, because the orchestrator never talks to the engine."""
    process = await asyncio.create_subprocess_exec(
        *program("toolcrew.workers.sandboxd", "--check", "--json"),
        env=child_environment({}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        await _end(process)
        report.add(
            "engine",
            False,
            f"the check of engine and sandbox did not end within {CHECK_TIMEOUT_S:g} s: restart the engine",
        )
        return
    try:
        facts = json.loads(out)
    except ValueError:
        report.add(
            "engine",
            False,
            err.decode(errors="replace").strip()[-300:] or "the check ended without output: run it again",
        )
        return
    report.guarantees = list(facts["guarantees"])
    if "engine" in facts:
        report.add("engine", True, f"{facts['engine']}, runtimes {', '.join(facts['runtimes'])}")
        report.add(
            "kernel",
            bool(facts["seccomp"]),
            f"{facts['kernel']}, cgroup v{facts['cgroup']}, seccomp {'on' if facts['seccomp'] else 'off'}",
        )
        report.add(
            "image",
            facts.get("image_id") is not None,
            str(facts["image"])
            if facts.get("image_id")
            else f"{facts['image']}: {advise_missing(str(facts['image']))}",
        )
    if "problem" in facts:
        report.add("sandbox", False, str(facts["problem"]))
    else:
        report.add(
            "sandbox",
            True,
            f"sandboxes are isolated as required under {facts['runtime']}: a sandbox was started, inspected and "
            "removed",
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the check. SIGTERM first, so that it removes its sandbox and folders; SIGKILL if that takes too long."""
    process.terminate()
    try:
        async with asyncio.timeout(CHECK_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
