"""Clients that follow programs' runs: at their own speed, from where they stopped, over one connection for all."""

import asyncio

import pytest
import redis.asyncio

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.run_events import FailureKind
from store import run_events
from store.run_events import RunEventHub, parse_id
from tests.hosted_harness import ECHO, HostedHarness, MadeHosted, types
from tests.item_harness import echo_then
from tests.run_harness import build_outcome
from tests.waiting import until


@pytest.fixture
def harness(make_hosted: MadeHosted) -> HostedHarness:
    return make_hosted(["done"])


# Followers


async def test_a_follower_continues_after_its_last_event(make_hosted: MadeHosted) -> None:
    harness = make_hosted(echo_then("done", "one"))
    run = await harness.start()
    async with harness.working():
        events = await harness.events(run)
    for at, event in enumerate(events):
        assert await harness.events(run, event["id"]) == events[at + 1 :]


async def test_a_slow_follower_delays_no_other_and_misses_nothing(
    make_hosted: MadeHosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "RING_EVENTS", 4)
    harness = make_hosted()
    run = await harness.start()
    claim = await harness.claimed()
    await harness.append_text(run, claim.token, "0")
    slow = harness.runs.follow("acme", run)
    received = [await anext(slow)]
    quick = asyncio.create_task(harness.events(run))
    for number in range(1, 100):
        await harness.append_text(run, claim.token, f"{number}", first=number)
    await harness.queue.finish(claim, build_outcome(claim, FailureKind.TOOL))
    events = await quick
    assert len(events) == 101
    received += [entry async for entry in slow]
    assert [event for event, _ in received] == [event["id"] for event in events]


async def test_one_connection_serves_all_and_nothing_is_left_when_they_have_gone(harness: HostedHarness) -> None:
    runs = [await harness.start() for _ in range(20)]
    following = [asyncio.create_task(harness.events(run)) for run in runs for _ in range(3)]
    await until(lambda: sum(stream.readers for stream in harness.runs.hub._streams.values()) >= 60)
    blocked = [client for client in await harness.client.client_list() if client["cmd"] == "xread"]
    assert len(blocked) <= 1
    for task in following[:30]:
        task.cancel()
    for run in runs[10:]:
        await harness.runs.cancel("acme", run)
    ends = await asyncio.gather(*following[30:])
    assert [types(events) for events in ends] == [["RunEnded"]] * 30
    await asyncio.gather(*following, return_exceptions=True)
    assert harness.runs.hub._streams == {}
    assert harness.runs.hub._reading is None


async def test_text_in_an_event_ends_no_stream(harness: HostedHarness) -> None:
    run = await harness.start()
    claim = await harness.claimed()
    hub, following = RunEventHub(harness.client, "d"), asyncio.create_task(harness.events(run))
    await harness.append_text(run, claim.token, 'x", "type": "RunEnded"', "RunEnded")
    await harness.append_text(run, claim.token, "y", first=2)
    await harness.queue.finish(claim, build_outcome(claim))
    assert len(await following) == 4
    await hub.close()


@pytest.mark.parametrize(
    "event",
    ["x", "-", "1-", "-1", "1-2-3", f"{2**64}", f"1-{2**64}", f"{2**64 - 1}-{2**64 - 1}", "1-0\r\nDEL", "²", "1" * 21],
)
def test_an_id_that_is_none_is_refused(event: str) -> None:
    with pytest.raises(ToolFailure) as failure:
        parse_id(event)
    assert failure.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_an_unknown_run_cannot_be_followed(harness: HostedHarness) -> None:
    for name in ("0" * 24, "x:events", "*"):
        with pytest.raises(ToolFailure):
            await harness.events(name)
    theirs = (await harness.runs.start("zeta", ECHO)).id
    with pytest.raises(ToolFailure):
        await harness.events(theirs)


async def test_a_new_follower_learns_that_redis_does_not_answer() -> None:
    async with redis.asyncio.Redis.from_url("redis://127.0.0.1:1", socket_timeout=1) as client:
        hub = RunEventHub(client, "d")
        with pytest.raises(BrokerUnavailable):
            await anext(hub.follow("acme", "0" * 24))
