"""Items get their sessions in order, as far as hosts have capacity."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from orchestrator.dispatch.placement import HostCapacity
from orchestrator.runs.session_turns import MAX_STALL_S, SessionTurns


class Hosts:
    """The free capacity of hosts, and a clock. `asked` is set whenever a session checks for capacity."""

    def __init__(self, room: HostCapacity | Exception | None) -> None:
        self.room = room
        self.now = 0.0
        self.asked = asyncio.Event()
        self.turns = SessionTurns(self.ask, lambda: self.now)
        self.opened: list[str] = []

    async def ask(self, tenant: str, image: str | None) -> HostCapacity | None:
        self.asked.set()
        if isinstance(self.room, Exception):
            raise self.room
        return self.room

    async def open(self, name: str, until: asyncio.Event, *, tenant: str = "acme") -> None:
        async with self.turns.turn(tenant, None):
            self.opened.append(name)
            await until.wait()

    async def looked(self) -> None:
        """Wait until a session has checked once more and waits again."""
        self.asked.clear()
        await self.asked.wait()
        await asyncio.sleep(0)


async def test_no_more_are_opened_at_a_time_than_keep_hosts_busy_and_who_came_first_is_first() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=100, sessions=100)), [asyncio.Event() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for number, event in enumerate(done):
            group.create_task(hosts.open(str(number), event))
        for number, event in enumerate(done):
            while len(hosts.opened) < min(5, number + 2):
                await hosts.looked()
            assert hosts.opened == [str(at) for at in range(min(5, number + 2))]
            event.set()


async def test_a_full_pool_is_waited_for_until_a_sandbox_is_free() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=0, sessions=100)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(hosts.open("late", done))
        hosts.now = MAX_STALL_S - 1
        await hosts.looked()
        assert hosts.opened == []
        hosts.room = HostCapacity(at_once=2, sandboxes=1, sessions=100)
        done.set()
        await opening
    assert hosts.opened == ["late"]


async def test_when_no_session_ends_for_long_sandboxes_are_shared() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=0, sessions=100)), asyncio.Event()
    done.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(hosts.open("patient", done))
        await hosts.looked()
        hosts.turns.note_end()
        hosts.now = MAX_STALL_S + 1
        hosts.turns.note_end()
        await hosts.looked()
        assert hosts.opened == []
        hosts.now = 2 * MAX_STALL_S + 1
    assert hosts.opened == ["patient"]


async def test_hosts_without_room_for_any_session_are_waited_for_however_long() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=0, sessions=0)), asyncio.Event()
    opening = asyncio.create_task(hosts.open("never", done))
    hosts.now = 100 * MAX_STALL_S
    await hosts.looked()
    await hosts.looked()
    assert hosts.opened == []
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # A session that leaves the queue does not block other sessions.
    hosts.room, _ = None, done.set()
    await hosts.open("next", done)
    assert hosts.opened == ["next"]


async def test_while_redis_is_away_items_wait_and_none_fails() -> None:
    hosts, done = Hosts(BrokerUnavailable("away")), asyncio.Event()
    done.set()
    async with asyncio.TaskGroup() as group:
        for name in ("one", "two"):
            group.create_task(hosts.open(name, done))
        await hosts.looked()
        assert hosts.opened == []
        hosts.room = HostCapacity(at_once=1, sandboxes=1, sessions=1)
    assert hosts.opened == ["one", "two"]


async def test_an_unknown_tenant_does_not_delay_the_next() -> None:
    hosts, done = Hosts(ToolFailure(ErrorCode.UNKNOWN_TENANT, "no")), asyncio.Event()
    with pytest.raises(ToolFailure):
        await hosts.open("stranger", done)
    hosts.room = None
    done.set()
    await hosts.open("known", done)
    assert hosts.opened == ["known"]


async def test_one_tenants_queue_does_not_hold_up_anothers() -> None:
    hosts, held, free = Hosts(HostCapacity(at_once=1, sandboxes=9, sessions=9)), asyncio.Event(), asyncio.Event()
    free.set()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        stack.callback(held.set)
        group.create_task(hosts.open("first", held))
        group.create_task(hosts.open("second", held))
        while not hosts.opened:
            await hosts.looked()
        await hosts.open("other", free, tenant="zoo")
        assert hosts.opened == ["first", "other"]
        held.set()
