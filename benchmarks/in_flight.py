"""Measure the CPU time of the orchestrator per call with 1 to 5,000 calls in flight: publishing, result hub and
clean-up.

The pool answers every call immediately.
"""

import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio
from pydantic import SecretStr

from benchmarks.processes import child_process
from benchmarks.raw_celery import next_attempt
from benchmarks.report import Report, median
from benchmarks.sizes import size
from tests.support.records.builders import build_attempt
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.connection import check_redis, open_redis

ROUNDS = size(5, 1)
CALLS = size(5000, 50)
ALONE = size(500, 5)
"""Number of calls in a round with one call in flight. Each call waits for a round trip through all processes."""
IN_FLIGHT = size((1, 50, 500, 5000), (1, 50))
ENVELOPE = "x" * 600
FLAT = 1.5
"""Largest allowed cost of a call at the highest number in flight, as a ratio to the cost at 50 in flight."""


@contextlib.asynccontextmanager
async def open_broker() -> AsyncIterator[BrokerSettings]:
    """Start a Redis server and yield its settings when the server answers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-")))
        port, password = reserve_port(), secrets.token_hex(8)
        config = write_redis_config(folder, port, password)
        stack.enter_context(child_process([find_redis_server(), str(config)], {}, folder / "redis.log"))
        broker = BrokerSettings(redis_url=SecretStr(f"redis://:{password}@127.0.0.1:{port}/0"))
        client = open_redis(broker)
        try:
            await _until_up(client, broker)
        finally:
            await client.aclose()
        yield broker


@contextlib.asynccontextmanager
async def open_transport() -> AsyncIterator[tuple[CeleryTransport, str]]:
    """Start a Redis server and a pool that answers immediately. Yield a transport and the queue of the pool."""
    async with contextlib.AsyncExitStack() as stack:
        broker, queue = await stack.enter_async_context(open_broker()), "bench.echo"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-")))
        client = open_redis(broker)
        argv = [sys.executable, "-m", "benchmarks.echo_pool", broker.redis_url.get_secret_value(), queue]
        stack.enter_context(child_process(argv, {}, folder / "echo.log"))
        hub = ResultHub(client)
        await hub.start()
        transport = CeleryTransport(broker, hub)
        try:
            yield transport, queue
        finally:
            await transport.aclose()
            await hub.close()
            await client.aclose()


async def _until_up(client: "redis.asyncio.Redis", broker: BrokerSettings) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            return await check_redis(client, broker)
        except BrokerUnavailable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.05)


async def cost(transport: CeleryTransport, queue: str, in_flight: int, calls: int) -> float:
    """Return the CPU seconds of this process per call, with `in_flight` calls at a time."""
    numbers = iter(range(calls))
    first = build_attempt("bench", tenant="bench", queue=queue, envelope=ENVELOPE)

    async def caller() -> None:
        for _ in numbers:
            await transport.deliver(next_attempt(first))

    started = time.process_time()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return (time.process_time() - started) / calls


def run(rounds: int = ROUNDS) -> Report:
    return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    report = Report(
        "in_flight", notes=[f"medians of {rounds} interleaved rounds; processor time of the orchestrator's process"]
    )
    spent: dict[int, list[float]] = {count: [] for count in IN_FLIGHT}
    async with open_transport() as (transport, queue):
        await cost(transport, queue, 50, 500)
        for _ in range(rounds):
            for count in IN_FLIGHT:
                spent[count].append(await cost(transport, queue, count, ALONE if count == 1 else CALLS))
    for count, seconds in spent.items():
        report.add(f"call_at_{count}_ms", median(seconds) * 1000, f"a call with {count} in flight")
    flat = median(spent[IN_FLIGHT[-1]]) / median(spent[50])
    report.add("growth_ratio", flat, f"with {IN_FLIGHT[-1]} in flight / with 50", at_most=FLAT)
    return report
