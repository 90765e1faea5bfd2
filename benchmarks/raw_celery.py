"""Baseline of every call through Celery: a worker like a toolcrew worker, with one task that does nothing.

The module also starts a toolcrew worker whose tools do as little.
"""

import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import redis.asyncio
from celery import Celery

from benchmarks.noop_worker import TASK
from benchmarks.processes import child_process
from tests.support.records.builders import build_attempt
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.store.call_messages import ResultHub
from toolcrew.workers.celery_edge.app import build_app


def next_attempt(first: Attempt) -> Attempt:
    """Return a copy of the attempt for another call, without the cost of validating its parts again."""
    call_id = secrets.token_hex(16)
    request = replace(first.request, call=first.request.call.model_copy(update={"id": call_id}))
    return replace(first, request=request, call_id=call_id, start_by=time.time() + 60)


class RawCelery:
    """Calls the no-op worker and waits in two ways: with Celery's `get`, and with toolcrew's result hub and a
    publishing transport.
    """

    def __init__(self, app: Celery, transport: CeleryTransport, queue: str) -> None:
        self._app = app
        self._transport = transport
        self._queue = queue
        self._attempt = build_attempt(TASK.removeprefix("tool."), tenant="bench", queue=queue, envelope="", wait_s=30.0)

    def by_get(self) -> None:
        self._app.send_task(TASK, queue=self._queue).get(timeout=30)

    async def by_hub(self) -> None:
        await self._transport.deliver(next_attempt(self._attempt))


def worker_environment(redis_url: str, slots: int) -> dict[str, str]:
    """Return the environment of a worker on that Redis."""
    return {"TOOLCREW_REDIS_URL": redis_url, "TOOLCREW_CONCURRENCY": str(slots), "TOOLCREW_LOG_LEVEL": "WARNING"}


@contextlib.contextmanager
def running_tools(redis_url: str, slots: int) -> Iterator[None]:
    """Run a toolcrew worker of operators' tools on that Redis, on prefork.

    The block begins before the worker is ready. Use `until_served` to wait for it.
    """
    environment = {
        **worker_environment(redis_url, slots),
        "TOOLCREW_WORKER_KIND": "web",
        "TOOLCREW_HOST": "bench-tools",
    }
    argv = [sys.executable, "-m", "benchmarks.noop_worker"]
    with (
        tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as folder,
        child_process(argv, environment, Path(folder) / "log"),
    ):
        yield


async def open_raw(
    redis_url: str,
    client: "redis.asyncio.Redis",
    stack: contextlib.AsyncExitStack,
    pool: str = "threads",
    slots: int = 4,
) -> RawCelery:
    """Start a no-op worker on this Redis and return when it answers. `stack` closes everything that is started."""
    broker = load_settings().broker(redis_url)
    queue = f"bench.{secrets.token_hex(4)}"
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-"))
    environment = {**worker_environment(redis_url, slots), "TOOLCREW_HOST": queue.replace(".", "-")}
    stack.enter_context(
        child_process([sys.executable, "-m", "benchmarks.noop_worker", queue, pool], environment, Path(folder) / "log")
    )
    hub = ResultHub(client)
    await hub.start()
    stack.push_async_callback(hub.close)
    transport = CeleryTransport(broker, hub)
    stack.push_async_callback(transport.aclose)
    app = build_app(broker)
    stack.callback(app.close)
    raw = RawCelery(app, transport, queue)
    await asyncio.to_thread(raw.by_get)
    return raw
