"""Measure the load time of the pages when a tenant has 10,000 runs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from pydantic import SecretStr

from benchmarks.fairness import open_server, until_it_answers
from benchmarks.report import Report, median
from benchmarks.sizes import size
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.api.service import ApiService
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.batches import RunBody
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants

RUNS, AT_ONCE = size((10_000, 100), (120, 60))
VIEWS = size(15, 2)
TARGET_MS = 300.0
TENANT = "default"


def run() -> Report:
    return asyncio.run(_run())


async def _run() -> Report:
    report = Report(
        "page",
        notes=[f"{RUNS} runs of one tenant; from the request to the last byte, the browser's own part not counted"],
    )
    with open_server() as url:
        settings = OrchestratorSettings.model_validate(
            {"redis_url": SecretStr(url), "secret": SecretStr("bench"), "api_key": None}
        )
        client = open_redis(settings.broker())
        try:
            await until_it_answers(client)
            key = (
                await ApiKeys(client, settings.deployment, settings.broker().signing_keys()).add(TENANT, "operator")
            ).text
            durable_runs = DurableRuns(
                client,
                settings.deployment,
                settings.broker().signing_keys(),
                RedisTenants(client, settings.deployment, settings.broker().signing_keys()),
            )
            first = await _start_runs(durable_runs)
            async with _open(settings, key) as pages:
                paths = {
                    "overview": "/",
                    "runs": "/runs",
                    "runs_of_tenant": f"/runs?tenant={TENANT}",
                    "failed_runs": f"/runs?tenant={TENANT}&state=failed",
                }
                for name, path in {**paths, "run": f"/runs/{first}"}.items():
                    cold, warm = await _measure_view(pages, path)
                    report.add(f"{name}_first_ms", cold, f"first view of {path.partition('?')[0]}", at_most=TARGET_MS)
                    report.add(f"{name}_ms", warm, "later ones")
        finally:
            await client.aclose()
    return report


async def _start_runs(durable_runs: DurableRuns) -> str:
    """Start the runs and return the id of the last run."""
    last = ""
    for at in range(0, RUNS, AT_ONCE):
        bodies = [
            RunBody(instruction=f"Count the files of folder {at + number}, and say which is the largest.")
            for number in range(AT_ONCE)
        ]
        started = await asyncio.gather(*(durable_runs.start(TENANT, body) for body in bodies))
        last = started[-1].id
    return last


@asynccontextmanager
async def _open(settings: OrchestratorSettings, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start a service with these settings and yield a client that is logged in."""
    addresses: asyncio.Queue[str] = asyncio.Queue()
    service = ApiService(settings, "127.0.0.1", 0, 0, announce=addresses.put_nowait)
    running = asyncio.create_task(service.run())
    try:
        url = await addresses.get()
        async with httpx.AsyncClient(base_url=url, timeout=60, headers={"Origin": url}) as client:
            # The service accepts requests before it has connected to Redis.
            while (await client.post("/login", data={"key": key})).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            yield client
    finally:
        service.stop()
        await running


async def _measure_view(client: httpx.AsyncClient, path: str) -> tuple[float, float]:
    """Return the milliseconds of the first view, and the median of later views."""
    took: list[Any] = []
    for _ in range(VIEWS):
        began = time.perf_counter()
        response = await client.get(path)
        took.append((time.perf_counter() - began) * 1000)
        response.raise_for_status()
    return took[0], median(took[1:])
