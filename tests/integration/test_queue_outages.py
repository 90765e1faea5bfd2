"""A Redis that stops during calls and comes back. On either pool every call is answered once, is executed once, and
no slot is lost.
"""

import asyncio
import contextlib
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.support.records.builders import build_attempt
from tests.support.redis.raw_queue import make_envelope
from tests.support.stack.service_process import run_program
from tests.support.stack.stack import Footprint, RedisServer, all_of, open_footprint, open_redis_server
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolCall
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.connection import open_redis

pytestmark = pytest.mark.stack

OUTAGE_S = 5.0
SLOTS = 2
CALLS = 6
POOLS = ("threads", "prefork")


@dataclass
class Harness:
    """A Redis and a worker on each pool, each with its own queue."""

    server: RedisServer
    broker: BrokerSettings
    footprint: Footprint

    def path(self, name: str) -> Path:
        return self.footprint.folder / name

    def executions(self, pool: str) -> Counter[str]:
        """Return how often each call was executed."""
        path = self.path(pool)
        return Counter(path.read_text().split()) if path.exists() else Counter()


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with open_redis_server() as server, open_footprint() as footprint, contextlib.ExitStack() as workers:
        broker = BrokerSettings.model_validate({"redis_url": server.url})
        for pool in POOLS:
            argv = [sys.executable, "-m", "tests.support.stack.tool_worker", pool, f"q.{pool}", str(SLOTS)]
            workers.enter_context(run_program(footprint, f"{pool}-worker", argv, {"TOOLCREW_REDIS_URL": server.url}))
        yield Harness(server, broker, footprint)


@pytest.fixture
async def transport(harness: Harness) -> AsyncIterator[CeleryTransport]:
    client = open_redis(harness.broker)
    hub = ResultHub(client)
    await hub.start()
    opened = CeleryTransport(harness.broker, hub)
    yield opened
    await opened.aclose()
    await hub.close()
    await client.aclose()


def start_delivery(harness: Harness, pool: str, tool: str, **arguments: Any) -> Attempt:
    call = ToolCall(id=secrets.token_hex(8), name=tool, arguments=arguments)
    envelope = make_envelope(harness.broker, call, tenant="acme", session="s1")
    return build_attempt(tool, queue=f"q.{pool}", call_id=call.id, envelope=envelope, wait_s=90.0)


async def test_every_call_is_in_the_celery_events_although_events_are_batched(
    harness: Harness, transport: CeleryTransport
) -> None:
    app = Celery("ear", broker=harness.server.url, set_as_current=False)
    event_counts: Counter[str] = Counter()
    path = str(harness.path("noted"))
    with app.connection() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": lambda event: event_counts.update([event["type"]])})
        ear = asyncio.create_task(asyncio.to_thread(receiver.capture, wakeup=False))
        try:
            await wait_until_async(lambda: event_counts["worker-heartbeat"] > 0, SOON_S, "events arrive")
            calls = [
                start_delivery(harness, pool, "append_tool", path=path, seconds=0) for pool in POOLS for _ in range(20)
            ]
            await all_of([transport.deliver(each) for each in calls], 60)
            await wait_until_async(
                lambda: event_counts["task-succeeded"] == len(calls), SOON_S, lambda: f"only received {event_counts}"
            )
        finally:
            # Otherwise the listener's thread would never end.
            receiver.should_stop = True
            await ear
    app.close()

    assert (event_counts["task-received"], event_counts["task-started"]) == (len(calls), len(calls))


async def test_calls_in_flight_survive_a_redis_outage_of_seconds(harness: Harness, transport: CeleryTransport) -> None:
    paths = {pool: str(harness.path(pool)) for pool in POOLS}
    sent = {
        pool: [start_delivery(harness, pool, "append_tool", path=paths[pool], seconds=1.0) for _ in range(CALLS)]
        for pool in POOLS
    }
    awaited = {pool: [asyncio.create_task(transport.deliver(each)) for each in sent[pool]] for pool in POOLS}
    await wait_until_async(
        lambda: all(harness.executions(pool).total() >= SLOTS for pool in POOLS), SOON_S, "both workers run calls"
    )

    harness.server.kill()
    await asyncio.sleep(OUTAGE_S)
    await asyncio.to_thread(harness.server.start)

    for pool in POOLS:
        results = await all_of(awaited[pool], 60)
        assert [result["success"] for result in results] == [True] * CALLS, pool
        assert harness.executions(pool) == Counter(each.call_id for each in sent[pool]), pool
    for pool in POOLS:
        meeting = harness.path(f"{pool}-meeting")
        meeting.mkdir()
        together = [start_delivery(harness, pool, "meet_tool", path=str(meeting), count=SLOTS) for _ in range(SLOTS)]
        assert [result["success"] for result in await all_of([transport.deliver(each) for each in together], 60)] == [
            True
        ] * SLOTS
        assert {path.name for path in meeting.iterdir()} == {each.call_id for each in together}
