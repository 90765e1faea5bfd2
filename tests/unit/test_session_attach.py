"""Taking over an open session from another program, and the order in which items get their sessions."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from orchestrator.dispatch.dispatcher import Dispatcher, Pool
from orchestrator.dispatch.placement import HostCapacity
from orchestrator.dispatch.sessions import Session, SessionStart
from orchestrator.dispatch.tenant_catalog import TenantCatalog
from orchestrator.runs.session_queue import MAX_STALL_S, SessionQueue
from tests.builders import KEY
from tests.fake_hosts import MemorySessionStore, NoLedger, StaticHosts, build_report
from tests.fakes import AnsweringTransport, MemoryAsyncBlobs, StaticCatalog
from workers.tools.builtin import build_registry

TOLD = {
    "host": "h1",
    "queue": "host.h1.b00t",
    "image": "python:3",
    "start_s": 0.5,
    "network": "egress",
    "hosts": ["a.example"],
    "workspace": "image",
}

SPECS = tuple(build_registry().specs())


class Harness:
    """One pool, and two programs that use it."""

    def __init__(self, facts: dict[str, Any] | None = None) -> None:
        self.facts = {**TOLD, **(facts or {})}
        self.places = MemorySessionStore()
        self.transport = AnsweringTransport(self._answer)
        self.blobs: Any = MemoryAsyncBlobs()
        self.first, self.second = self._program(), self._program()

    async def open(self, tenant: str = "acme") -> Session:
        return await Session.open(self.first, self.blobs, tenant=tenant, start=SessionStart(image="python", ttl_s=60))

    async def attach(self, session: str, tenant: str = "acme") -> Session:
        return await Session.attach(self.second, self.blobs, tenant=tenant, session=session)

    def sent(self) -> list[str]:
        return [call.name for call in self.transport.calls]

    def _program(self) -> Dispatcher:
        pool = Pool(self.places, StaticHosts(build_report()), NoLedger())  # type: ignore[arg-type]
        return Dispatcher(self.transport, TenantCatalog(StaticCatalog(*SPECS)), KEY, queue_wait_s=60, pool=pool)

    def _answer(self, call: ToolCall, context: ToolContext) -> ToolResult:
        metadata: dict[str, Any] = dict(self.facts) if call.name == "session.open" else {}
        return ToolResult(call_id=call.id, name=call.name, success=True, output="hello", metadata=metadata)


@pytest.mark.parametrize(
    ("class_s", "tool", "own", "argument", "limit"),
    [
        (86_400, "bash_tool", 86_400, None, 86_400),
        (86_400, "bash_tool", None, 7_200, 7_200),
        (86_400, "read_tool", 7_200, None, 600),
        (3_600, "bash_tool", 7_200, None, "class 'default'"),
        (3_600, "bash_tool", None, 7_200, 3_600),
        (None, "bash_tool", 601, None, "600 s at most"),
        (None, "bash_tool", None, 601, 600),
    ],
)
async def test_a_call_runs_as_long_as_the_class_of_its_session_allows(
    class_s: float | None, tool: str, own: float | None, argument: float | None, limit: float | str
) -> None:
    """A model that asks for too much gets the most. A program is refused."""
    harness = Harness({"timeout_s": class_s} if class_s is not None else {})
    session = await harness.open()
    arguments = {"bash_tool": {"command": "x"}, "read_tool": {"path": "x"}}[tool]
    result = await session.call(tool, arguments | ({"timeout": argument} if argument else {}), timeout_s=own)
    if isinstance(limit, str):
        assert (result.error_code, limit in str(result.error)) == (ErrorCode.INVALID_ARGUMENTS, True)
        assert harness.sent() == ["session.open"]
    else:
        delivery = harness.transport.deliveries[-1]
        assert (delivery.request.context.timeout_s, delivery.request.wait_s > limit) == (limit, True)
    assert (await session.info()).timeout_s == (class_s or 600)


async def test_an_attached_session_needs_no_request_for_its_facts() -> None:
    harness = Harness()
    opened = await harness.open()
    info = await (await harness.attach(opened.id)).info()
    assert (info.image, info.network, info.hosts, info.workspace) == ("python:3", "egress", ("a.example",), "image")
    assert info.describe_network() == (await opened.info()).describe_network()
    assert harness.sent() == ["session.open"]


async def test_a_session_of_an_earlier_release_asks_its_host() -> None:
    harness = Harness()
    opened = await harness.open()
    harness.places.loss_facts.clear()
    info = await (await harness.attach(opened.id)).info()
    assert (info.image, info.host) == ("python:3", "h1")
    assert harness.sent() == ["session.open", "session.open"]
    assert harness.transport.calls[-1].arguments == {"image": "python", "ttl_s": 60}
    assert harness.transport.contexts[-1].fence == 1


async def test_a_session_of_another_tenant_is_unknown() -> None:
    """The attacker's aim: to learn which ids exist. Invalid names, or names that lead to other keys, get the same
    reply.
    """
    harness = Harness()
    foreign = (await harness.open("bolt")).id
    reported = set()
    for name in (
        foreign,
        "never-was",
        "",
        "x" * 65,
        f"../bolt:session:{foreign}",
        f"{foreign}:place",
        "ä",
        f"{foreign}\n",
    ):
        with pytest.raises(ToolFailure) as refused:
            await harness.attach(name, "acme")
        reported.add((refused.value.code, refused.value.message))
    assert [code for code, _ in reported] == [ErrorCode.SESSION_NOT_FOUND]
    assert "bolt" not in str(reported)


async def test_a_program_that_is_stopped_leaves_an_attached_session_open() -> None:
    harness = Harness()
    opened = await harness.open()

    async def work() -> None:
        async with await harness.attach(opened.id):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await work()
    assert (harness.sent(), harness.transport.commands) == (["session.open"], [])


class Hosts:
    """The free capacity of hosts, and a clock. `asked` is set whenever a session checks for capacity."""

    def __init__(self, room: HostCapacity | Exception | None) -> None:
        self.room = room
        self.now = 0.0
        self.asked = asyncio.Event()
        self.queue = SessionQueue(self.ask, lambda: self.now)
        self.opened: list[str] = []

    async def ask(self, tenant: str, image: str | None) -> HostCapacity | None:
        self.asked.set()
        if isinstance(self.room, Exception):
            raise self.room
        return self.room

    async def open(self, name: str, until: asyncio.Event, *, tenant: str = "acme") -> None:
        async with self.queue.enter(tenant, None):
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
        hosts.queue.record_end()
        hosts.now = MAX_STALL_S + 1
        hosts.queue.record_end()
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
