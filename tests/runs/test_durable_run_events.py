"""Events of programs' runs: in order, once, complete and bounded, even if a process dies or is slow. Clients follow
them at their own speed, from where they stopped, over one connection for all.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.runs.durable_run_harness import DurableRunFactory, DurableRunHarness, open_durable, types
from tests.support.runs.item_harness import echo_then
from tests.support.runs.run_harness import build_outcome
from tests.support.stack.waiting import SOON_S, until, wait_until_async
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ModelInterrupted, ToolFailure
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    FailureKind,
    OutputArrived,
    StepFinished,
    StepStarted,
    TextArrived,
)
from toolcrew.contract.run_views import DurableRunState
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.runs.event_publisher import MAX_BUFFERED_CHARS, MAX_OUTPUT_CHARS, RunEventBuffer
from toolcrew.store import run_events
from toolcrew.store.run_events import MAX_EVENT_BYTES, RunEventHub, build_event, is_before, parse_id


@pytest.fixture
def harness(make_durable: DurableRunFactory) -> DurableRunHarness:
    return make_durable(["done"])


def text(content: str) -> TextArrived:
    return TextArrived(run="r", text=content)


def step(number: int) -> StepFinished:
    return StepFinished(run="r", step=number, model_s=0.0, usage=TokenUsage())


@pytest.fixture
def buffer() -> RunEventBuffer:
    return RunEventBuffer("acme", "r", "claim", 1, published_step=0)


def take_events(buffer: RunEventBuffer) -> list[dict[str, Any]]:
    """Take all events out of the buffer, as a publisher does."""
    events: list[dict[str, Any]] = []
    while buffer.has_pending:
        batch = buffer.take()
        assert batch is not None
        buffer.confirm(len(batch.events), is_ours=True)
        events += [json.loads(event) for event in batch.events]
    return events


def are_increasing(ids: list[str]) -> bool:
    return all(is_before(earlier, later) for earlier, later in itertools.pairwise(ids))


def test_consecutive_text_events_are_joined(buffer: RunEventBuffer) -> None:
    for event in (text("a"), text("b"), step(1), text("c"), text("d")):
        buffer.on_event(event)
    assert [event.get("text") for event in take_events(buffer)] == ["ab", None, "cd"]
    buffer.on_event(text("e"))
    assert [event["text"] for event in take_events(buffer)] == ["e"]


def test_output_above_the_limit_is_omitted_with_one_event(buffer: RunEventBuffer) -> None:
    for _ in range(100):
        buffer.on_event(OutputArrived(run="r", call_id="c", stream="stdout", text="x" * 10_000))
    events = take_events(buffer)
    assert sum(len(event.get("text", "")) for event in events) <= MAX_OUTPUT_CHARS
    assert types(events).count("OutputOmitted") == 1


def test_a_full_buffer_omits_texts_and_keeps_step_events(buffer: RunEventBuffer) -> None:
    for number in range(1, 4):
        buffer.on_event(StepStarted(run="r", step=number))
        for _ in range(2000):
            buffer.on_event(text("x" * 1000))
        buffer.on_event(step(number))
    events = take_events(buffer)
    assert sum(len(event.get("text", "")) for event in events) <= MAX_BUFFERED_CHARS
    assert [event["step"] for event in events if event["type"] == "StepFinished"] == [1, 2, 3]
    assert [event["count"] > 0 for event in events if event["type"] == "EventsOmitted"] == [True]


def test_events_of_published_steps_are_not_published_again() -> None:
    buffer = RunEventBuffer("acme", "r", "claim", 1, published_step=1)
    for number in (1, 2):
        for event in (StepStarted(run="r", step=number), text(f"step {number}"), step(number)):
            buffer.on_event(event)
    assert types(take_events(buffer)) == ["StepStarted", "TextArrived", "StepFinished"]


def test_open_approvals_are_counted(buffer: RunEventBuffer) -> None:
    call = ToolCall(id="c", name="echo")
    for event, open_approvals in (
        (ApprovalAsked(run="r", call=call, digest="d", reason="", warning="", expires_at=0.0), 1),
        (ApprovalDecided(run="r", call_id="c", digest="d", is_allowed=True, reason=""), 0),
    ):
        buffer.on_event(event)
        batch = buffer.take()
        assert batch is not None
        assert batch.asking == open_approvals


@pytest.mark.parametrize("hostile", ["\x00\x1b[2J‮" * 9000, "\ud83d" * 9000, "\U0001f600" * 9000, '"RunEnded"' * 9000])
def test_an_event_with_any_content_is_bounded(hostile: str) -> None:
    result = ToolResult.failed(ToolCall(id="c", name="echo"), ErrorCode.TIMEOUT, "no", metadata={"x": "y"})
    fields = {**CallFinished(run="r", result=result).to_json(), "deep": {"a": [{"b": hostile}] * 30}, "name": hostile}
    event = build_event(fields)
    assert len(event.encode()) <= MAX_EVENT_BYTES
    assert json.loads(event)["is_cut"] is True
    assert json.loads(event)["type"] == "CallFinished"


async def test_events_are_stored_once_and_only_from_the_holder(harness: DurableRunHarness) -> None:
    run = await harness.start()
    claim = await harness.claim_next()
    assert await harness.append_text(run, claim.token, "a", "b")
    assert await harness.append_text(run, claim.token, "a", "b", "c")
    assert not await harness.append_text(run, "other", "x")
    await harness.queue.finish(claim, build_outcome(claim))
    assert not await harness.append_text(run, claim.token, "late", first=3)
    assert [event.get("text") for event in await harness.stored_events(run)] == ["a", "b", "c", None]


async def test_a_stream_is_bounded_and_reports_missed_events_to_a_late_reader(
    harness: DurableRunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "MAX_EVENTS", 10)
    run = await harness.start()
    claim = await harness.claim_next()
    for number in range(50):
        await harness.append_text(run, claim.token, f"{number}", first=number)
    monkeypatch.setattr(run_events, "MAX_STREAM_BYTES", 200)
    await harness.append_text(run, claim.token, "last", first=50)
    assert len(await harness.stored_events(run)) <= 5
    await harness.queue.finish(claim, build_outcome(claim))
    events = await harness.events(run)
    assert types(events)[0] == "EventsMissed"
    assert [event["text"] for event in events[1:-1]] == ["46", "47", "48", "49", "last"][-len(events) + 2 :]
    assert types(events)[-1] == "RunEnded"
    assert are_increasing([event["id"] for event in events])
    # From there nothing is missed any more.
    assert await harness.events(run, events[0]["id"]) == events[1:]


async def test_a_run_reports_its_end_after_its_event_stream_expired(harness: DurableRunHarness) -> None:
    run = await harness.start()
    async with harness.working():
        events = await harness.events(run)
    key = f"toolcrew:d:t:acme:run.{run}:events"
    assert 0 < await harness.client.ttl(key) <= 86_400
    await harness.client.delete(key)
    remaining = await harness.events(run)
    assert types(remaining) == ["EventsMissed", "RunEnded"]
    assert remaining[-1]["id"] == events[-1]["id"]
    assert types(await harness.events(run, events[2]["id"])) == ["EventsMissed", "RunEnded"]
    assert await harness.events(run, events[-1]["id"]) == []


async def test_a_run_lost_by_redis_ends_for_its_followers(harness: DurableRunHarness) -> None:
    run = await harness.start()
    await harness.client.hdel(f"toolcrew:d:t:acme:run.{run}", "item")
    follower = asyncio.create_task(harness.events(run))
    await until(lambda: harness.runs.hub._streams)
    async with harness.working():
        events = await follower
    assert [(event["type"], event["failure"]["code"]) for event in events] == [("RunEnded", "run_lost")]


async def test_events_are_complete_after_the_holder_of_a_run_is_killed(
    redis_server: RedisProcess, make_durable: DurableRunFactory
) -> None:
    harness = make_durable(["done"])
    run = await harness.start()
    follower = asyncio.create_task(harness.events(run))
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.runs.durable_run_holder", redis_server.url
    )
    try:
        async with asyncio.timeout(SOON_S):
            async for _, line in harness.runs.follow("acme", run):
                event = json.loads(line)
                if event["type"] == "CallSent" and event["call"]["arguments"] == {"text": "two"}:
                    break
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        await holder.wait()
    session = (await harness.stored_events(run))[0]["session"]
    await harness.places.open("acme", session, "host.h1.b00t", start="{}", ttl_s=60, limit=9)
    await harness.client.zadd("toolcrew:d:runs:leases", {f"acme|{run}": 1.0})
    async with harness.working():
        events = await follower
    assert are_increasing([event["id"] for event in events])
    (at,) = [at for at, event in enumerate(events) if event["type"] == "RunResumed"]
    assert events[at]["step"] == 2
    # Without void events, each step is reported once, from its start to its end.
    before, after = types(events[:at]), types(events[at + 1 :])
    valid = before[: before.index("StepFinished") + 1]
    assert [name for name in valid if "Step" in name] == ["StepStarted", "StepFinished"]
    assert [name for name in after if "Step" in name] == ["StepStarted", "StepFinished"] * 2
    assert after.count("CallFinished") == 1
    assert types(events).count("RunEnded") == 1
    record = await harness.runs.get("acme", run)
    assert record.state is DurableRunState.SUCCEEDED
    assert record.end is not None
    assert (record.end.answer, record.end.steps) == ("done", 3)
    roles = [message["role"] for message in await harness.runs.transcript("acme", run)]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


async def test_a_restarted_run_reports_that_earlier_events_are_void(
    make_durable: DurableRunFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_durable(["done"])
    run = await harness.start()
    claim = await harness.claim_next()
    async with harness.publisher.open("acme", run, claim.token, 1) as publisher:
        publisher.on_event(step(1))
    await harness.queue.give_back(claim, is_new=True)
    async with harness.working():
        events = await harness.events(run)
    assert types(events)[:2] == ["StepFinished", "RunResumed"]
    assert (events[1]["step"], events[1]["attempt"]) == (1, 2)
    assert (await harness.runs.get("acme", run)).attempt == 2


async def test_events_during_a_redis_outage_are_stored_afterwards(redis_server: RedisProcess) -> None:
    async with open_durable(redis_server) as make:
        harness = make(["done"])
        run = await harness.start()
        claim = await harness.claim_next()
        follower = asyncio.create_task(harness.events(run))
        async with harness.publisher.open("acme", run, claim.token, 1) as publisher:
            publisher.on_event(text("before"))
            await wait_until_async(lambda: harness.stored_events(run), SOON_S, "the event is stored", 0.01)
            await harness.client.save()
            redis_server.stop()
            publisher.on_event(text("meanwhile"))
            with pytest.raises(BrokerUnavailable):
                await harness.runs.get("acme", run)
            redis_server.start()
            publisher.on_event(text("after"))
        await harness.queue.finish(claim, build_outcome(claim))
        events = await follower
        assert "".join(event.get("text", "") for event in events) == "beforemeanwhileafter"
        assert types(events)[-1] == "RunEnded"


async def test_model_text_is_reported_as_it_arrives_and_only_once(make_durable: DurableRunFactory) -> None:
    may_continue = asyncio.Event()

    class SlowModel:
        name = "slow"

        async def stream(self, request: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"choices": [{"index": 0, "delta": {"content": "half "}}]}
            await may_continue.wait()
            yield {"choices": [{"index": 0, "delta": {"content": "whole"}, "finish_reason": "stop"}]}

        async def aclose(self) -> None: ...

    harness = make_durable(SlowModel())
    run = await harness.start()
    pieces = []
    async with harness.working():
        async for _, line in harness.runs.follow("acme", run):
            event = json.loads(line)
            if event["type"] == "TextArrived":
                pieces.append(event["text"])
                may_continue.set()
    assert pieces == ["half ", "whole"]


async def test_text_of_an_interrupted_reply_is_withdrawn(make_durable: DurableRunFactory) -> None:
    class InterruptedModel:
        name = "breaking"
        requests = 0

        async def stream(self, request: Any) -> AsyncIterator[dict[str, Any]]:
            self.requests += 1
            yield {"choices": [{"index": 0, "delta": {"content": "lost" if self.requests == 1 else "kept"}}]}
            if self.requests == 1:
                raise ModelInterrupted("it broke off")
            yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

        async def aclose(self) -> None: ...

    harness = make_durable(InterruptedModel())
    run = await harness.start()
    async with harness.working():
        events = await harness.events(run)
    texts = [
        (event["type"], event.get("text", event.get("characters")))
        for event in events
        if event["type"].startswith("Text")
    ]
    assert texts == [("TextArrived", "lost"), ("TextWithdrawn", 4), ("TextArrived", "kept")]


async def test_a_follower_continues_after_its_last_event(make_durable: DurableRunFactory) -> None:
    harness = make_durable(echo_then("done", "one"))
    run = await harness.start()
    async with harness.working():
        events = await harness.events(run)
    for at, event in enumerate(events):
        assert await harness.events(run, event["id"]) == events[at + 1 :]


async def test_a_slow_follower_misses_no_event_and_delays_no_other(
    make_durable: DurableRunFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "RING_EVENTS", 4)
    harness = make_durable()
    run = await harness.start()
    claim = await harness.claim_next()
    await harness.append_text(run, claim.token, "0")
    slow_follower = harness.runs.follow("acme", run)
    received = [await anext(slow_follower)]
    fast_follower = asyncio.create_task(harness.events(run))
    for number in range(1, 100):
        await harness.append_text(run, claim.token, f"{number}", first=number)
    await harness.queue.finish(claim, build_outcome(claim, FailureKind.TOOL))
    events = await fast_follower
    assert len(events) == 101
    received += [entry async for entry in slow_follower]
    assert [event for event, _ in received] == [event["id"] for event in events]


async def test_one_connection_serves_all_followers_and_is_released(harness: DurableRunHarness) -> None:
    runs = [await harness.start() for _ in range(20)]
    follower = [asyncio.create_task(harness.events(run)) for run in runs for _ in range(3)]
    await until(lambda: sum(stream.readers for stream in harness.runs.hub._streams.values()) >= 60)
    blocked = [client for client in await harness.client.client_list() if client["cmd"] == "xread"]
    assert len(blocked) <= 1
    for task in follower[:30]:
        task.cancel()
    for run in runs[10:]:
        await harness.runs.cancel("acme", run)
    event_lists = await asyncio.gather(*follower[30:])
    assert [types(events) for events in event_lists] == [["RunEnded"]] * 30
    await asyncio.gather(*follower, return_exceptions=True)
    assert harness.runs.hub._streams == {}
    assert harness.runs.hub._reading is None


async def test_event_text_that_resembles_an_end_event_does_not_end_the_stream(harness: DurableRunHarness) -> None:
    run = await harness.start()
    claim = await harness.claim_next()
    hub, follower = RunEventHub(harness.client, "d"), asyncio.create_task(harness.events(run))
    await harness.append_text(run, claim.token, 'x", "type": "RunEnded"', "RunEnded")
    await harness.append_text(run, claim.token, "y", first=2)
    await harness.queue.finish(claim, build_outcome(claim))
    assert len(await follower) == 4
    await hub.close()


@pytest.mark.parametrize(
    "event",
    ["x", "-", "1-", "-1", "1-2-3", f"{2**64}", f"1-{2**64}", f"{2**64 - 1}-{2**64 - 1}", "1-0\r\nDEL", "²", "1" * 21],
)
def test_an_invalid_event_id_is_refused(event: str) -> None:
    with pytest.raises(ToolFailure) as failure:
        parse_id(event)
    assert failure.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_a_new_follower_fails_when_redis_is_unreachable() -> None:
    async with redis.asyncio.Redis.from_url("redis://127.0.0.1:1", socket_timeout=1) as client:
        hub = RunEventHub(client, "d")
        with pytest.raises(BrokerUnavailable):
            await anext(hub.follow("acme", "0" * 24))
