"""A Redis that stops and restarts during calls whose events are being read."""

import asyncio
import time
from typing import Any

import pytest

from contract.call_events import OUTPUT
from contract.errors import BrokerUnavailable
from orchestrator.dispatch.call_events import output_handler
from tests.conftest import RedisProcess
from tests.event_harness import EventHarness, Screen, run_call


async def test_a_call_continues_without_its_events_and_events_of_later_calls_arrive_again(
    harness: EventHarness, redis_server: RedisProcess
) -> None:
    before, after = Screen(), Screen()
    await harness.hear(lambda writer: writer.show("stdout", "before"), before.show, "call-1")

    writer = harness.writer("call-2")
    async with harness.events.listen("acme", "call-2", {OUTPUT: output_handler(Screen().show)}, 30):
        await asyncio.to_thread(redis_server.stop)
        started = time.monotonic()
        hidden = await asyncio.to_thread(run_call, lambda w: [w.show("stdout", "x" * 1000) for _ in range(100)], writer)
        took = time.monotonic() - started
        await asyncio.to_thread(redis_server.start)
    assert (before.text(), hidden) == ("before", 100_000)
    assert took < 2

    await harness.hear(lambda w: w.show("stdout", "after"), after.show, "call-3")
    assert after.text() == "after"


async def test_what_was_woken_while_redis_failed_is_read_as_soon_as_it_works_again(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, failures = asyncio.Event(), [BrokerUnavailable("away") for _ in range(3)]
    read = harness.events._read

    async def read_when_it_works(calls: Any) -> None:
        if failures:
            raise failures.pop()
        await read(calls)

    monkeypatch.setattr("orchestrator.dispatch.call_events.RETRY_S", 0.01)
    monkeypatch.setattr(harness.events, "_read", read_when_it_works)
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(lambda *_: arrived.set())}, 30):
        await asyncio.to_thread(harness.writer().show, "stdout", "x")
        async with asyncio.timeout(2):
            await arrived.wait()
