"""Clients that follow programs' runs: at their own speed, from where they stopped, over one connection for all."""

import asyncio

import pytest
import redis.asyncio

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.run_events import FailureKind
from store import run_events
from store.run_events import RunEventHub, parse_id
from tests.hosted_ground import ECHO, HostedGround, MadeHosted, types
from tests.item_ground import echo_then
from tests.run_ground import build_outcome


@pytest.fixture
def ground(make_hosted: MadeHosted) -> HostedGround:
    return make_hosted(["done"])


# Followers


async def test_a_follower_continues_after_its_last_event(make_hosted: MadeHosted) -> None:
    ground = make_hosted(echo_then("done", "one"))
    run = await ground.start()
    async with ground.working():
        events = await ground.events(run)
    for at, event in enumerate(events):
        assert await ground.events(run, event["id"]) == events[at + 1 :]


async def test_a_slow_follower_delays_no_other_and_misses_nothing(
    make_hosted: MadeHosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events, "RING_EVENTS", 4)
    ground = make_hosted()
    run = await ground.start()
    claim = await ground.claimed()
    await ground.append_text(run, claim.token, "0")
    slow = ground.runs.follow("acme", run)
    seen = [await anext(slow)]
    quick = asyncio.create_task(ground.events(run))
    for number in range(1, 100):
        await ground.append_text(run, claim.token, f"{number}", first=number)
    await ground.queue.finish(claim, build_outcome(claim, FailureKind.TOOL))
    events = await quick
    assert len(events) == 101
    seen += [entry async for entry in slow]
    assert [event for event, _ in seen] == [event["id"] for event in events]


async def test_one_connection_serves_all_and_nothing_is_left_when_they_have_gone(ground: HostedGround) -> None:
    runs = [await ground.start() for _ in range(20)]
    following = [asyncio.create_task(ground.events(run)) for run in runs for _ in range(3)]
    while sum(stream.readers for stream in ground.runs.hub._streams.values()) < 60:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    blocked = [client for client in await ground.client.client_list() if client["cmd"] == "xread"]
    assert len(blocked) <= 1
    for task in following[:30]:
        task.cancel()
    for run in runs[10:]:
        await ground.runs.cancel("acme", run)
    ends = await asyncio.gather(*following[30:])
    assert [types(events) for events in ends] == [["RunEnded"]] * 30
    await asyncio.gather(*following, return_exceptions=True)
    assert ground.runs.hub._streams == {}
    assert ground.runs.hub._reading is None


async def test_text_in_an_event_ends_no_stream(ground: HostedGround) -> None:
    run = await ground.start()
    claim = await ground.claimed()
    hub, following = RunEventHub(ground.client, "d"), asyncio.create_task(ground.events(run))
    await ground.append_text(run, claim.token, 'x", "type": "RunEnded"', "RunEnded")
    await ground.append_text(run, claim.token, "y", first=2)
    await ground.queue.finish(claim, build_outcome(claim))
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


async def test_an_unknown_run_cannot_be_followed(ground: HostedGround) -> None:
    for name in ("0" * 24, "x:events", "*"):
        with pytest.raises(ToolFailure):
            await ground.events(name)
    theirs = (await ground.runs.start("zeta", ECHO)).id
    with pytest.raises(ToolFailure):
        await ground.events(theirs)


async def test_a_new_follower_learns_that_redis_does_not_answer() -> None:
    async with redis.asyncio.Redis.from_url("redis://127.0.0.1:1", socket_timeout=1) as client:
        hub = RunEventHub(client, "d")
        with pytest.raises(BrokerUnavailable):
            await anext(hub.follow("acme", "0" * 24))
