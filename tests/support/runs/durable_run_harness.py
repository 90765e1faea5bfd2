"""Runs that programs start, executed on a real Redis. The model follows a script, and the pool's only worker is a
function.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.item_harness import ItemHarness
from tests.support.sandboxd.fake_hosts import MemorySessionStore
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.run_service import build_service_executor
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.store.run_events import EventBatch, RunEventStore
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.run_records import DurableRun

ECHO = RunBody(instruction="say it", tools=("echo",))
Event = dict[str, Any]
DurableRunFactory = Callable[..., "DurableRunHarness"]


class DurableRunHarness(ItemHarness):
    """A process that starts runs of tenant acme, follows the runs, and executes the runs inside `working`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.publisher = RunEventPublisher(self.client, "d")
        self.work = build_service_executor(self.pool, self.builder, self.work.models, None, self.publisher)
        self.runs = DurableRuns(self.client, "d", KEY, self.pool.tenants)

    def runner(self, **options: Any) -> Runner:
        return Runner(self.client, "d", self.queue, self.work, RunEventPublisher(self.client, "d"), 8, None, **options)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Runner]:
        """Execute waiting runs within the block."""
        runner = self.runner()
        task = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(SOON_S):
                yield runner
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def start(self, body: RunBody = ECHO, **options: Any) -> str:
        """Start a run and return its id."""
        environment = options.pop("environment", ItemEnvironment())
        return (await self.runs.start("acme", body, environment, **options)).id

    async def append_text(self, run: str, claim: str, *texts: str, first: int = 0) -> bool:
        """Append events with these texts to the run's stream. Return whether the claim may still append events."""
        events = [json.dumps({"type": "TextArrived", "text": text}) for text in texts]
        return (await RunEventStore(self.client, "d").append([EventBatch("acme", run, claim, first, events)]))[0]

    async def events(self, run: str, after: str = "") -> list[Event]:
        """Return all events of a run until its end. The end must come soon."""
        async with asyncio.timeout(SOON_S):
            return [json.loads(text) | {"id": event} async for event, text in self.runs.follow("acme", run, after)]

    async def ended(self, run: str) -> DurableRun:
        await self.events(run)
        return await self.runs.get("acme", run)

    async def stored_events(self, run: str) -> list[Event]:
        """Return the events that the run's stream contains now."""
        found: Any = await self.client.xrange(f"toolcrew:d:t:acme:run.{run}:events")
        return [json.loads(fields[b"e"]) | {"id": event.decode()} for event, fields in found]

    async def claim_next(self) -> RunClaim:
        """Claim the next run without a runner."""
        (claim,) = await self.queue.claim(1)
        return claim


def types(events: list[Event]) -> list[str]:
    return [str(event["type"]) for event in events]


@asynccontextmanager
async def open_durable(redis_server: RedisProcess) -> AsyncIterator[DurableRunFactory]:
    """Yield a factory of processes on one Redis that share the session locations."""
    places, made = MemorySessionStore(), list[DurableRunHarness]()
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=30) as client:

        def make(*arguments: Any, **options: Any) -> DurableRunHarness:
            made.append(DurableRunHarness(client, *arguments, places=places, **options))
            return made[-1]

        with capture_logs():
            try:
                yield make
            finally:
                for harness in made:
                    await harness.runs.hub.close()
