"""Taking over an open session from another program, and the order in which items get their sessions."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.records.builders import KEY
from tests.support.records.fakes import AnsweringTransport, MemoryAsyncBlobs, StaticCatalog
from tests.support.sandboxd.fake_hosts import MemorySessionStore, NoLedger, StaticHosts, build_report
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher, Pool
from toolcrew.orchestrator.dispatch.placement import HostCapacity
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.runs.session_queue import MAX_STALL_S, SessionQueue
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.workers.tools.builtin import build_registry

SESSION_FACTS = {
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
        self.facts = {**SESSION_FACTS, **(facts or {})}
        self.places = MemorySessionStore()
        self.transport = AnsweringTransport(self._answer)
        self.blobs: Any = MemoryAsyncBlobs()
        self.first = self._program()
        self.second = self._program()

    async def open(self, tenant: str = "acme") -> Session:
        return await Session.open(self.first, self.blobs, tenant=tenant, spec=SessionSpec(image="python", ttl_s=60))

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
    ("class_s", "tool", "program_limit", "argument", "limit"),
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
async def test_call_timeout_is_limited_by_the_class(
    class_s: float | None, tool: str, program_limit: float | None, argument: float | None, limit: float | str
) -> None:
    """A model that asks for too much gets the most. A program is refused."""
    harness = Harness({"timeout_s": class_s} if class_s is not None else {})
    session = await harness.open()
    arguments = {"bash_tool": {"command": "x"}, "read_tool": {"path": "x"}}[tool]
    result = await session.call(tool, arguments | ({"timeout": argument} if argument else {}), timeout_s=program_limit)
    if isinstance(limit, str):
        assert (result.error_code, limit in str(result.error)) == (ErrorCode.INVALID_ARGUMENTS, True)
        assert harness.sent() == ["session.open"]
    else:
        delivery = harness.transport.deliveries[-1]
        assert (delivery.request.context.timeout_s, delivery.request.wait_s > limit) == (limit, True)
    assert (await session.info()).timeout_s == (class_s or 600)


async def test_attached_session_reads_its_facts_without_a_request() -> None:
    harness = Harness()
    opened = await harness.open()
    info = await (await harness.attach(opened.id)).info()
    assert (info.image, info.network, info.hosts, info.workspace) == ("python:3", "egress", ("a.example",), "image")
    assert info.describe_network() == (await opened.info()).describe_network()
    assert harness.sent() == ["session.open"]


async def test_session_without_stored_facts_asks_its_host() -> None:
    harness = Harness()
    opened = await harness.open()
    harness.places.loss_facts.clear()
    info = await (await harness.attach(opened.id)).info()
    assert (info.image, info.host) == ("python:3", "h1")
    assert harness.sent() == ["session.open", "session.open"]
    assert harness.transport.calls[-1].arguments == {"image": "python", "ttl_s": 60}
    assert harness.transport.contexts[-1].fence == 1


async def test_session_of_another_tenant_cannot_be_attached() -> None:
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


async def test_stopped_program_leaves_an_attached_session_open() -> None:
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
        self.capacity = room
        self.now = 0.0
        self.checked = asyncio.Event()
        self.queue = SessionQueue(self.ask, lambda: self.now)
        self.opened: list[str] = []

    async def ask(self, tenant: str, image: str | None) -> HostCapacity | None:
        self.checked.set()
        if isinstance(self.capacity, Exception):
            raise self.capacity
        return self.capacity

    async def open(self, name: str, until: asyncio.Event, *, tenant: str = "acme") -> None:
        async with self.queue.enter(tenant, None):
            self.opened.append(name)
            await until.wait()

    async def wait_for_check(self) -> None:
        """Wait until a session has checked once more and waits again."""
        self.checked.clear()
        await self.checked.wait()
        await asyncio.sleep(0)


async def test_sessions_open_in_order_up_to_the_concurrent_limit() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=100, sessions=100)), [asyncio.Event() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for number, event in enumerate(done):
            group.create_task(hosts.open(str(number), event))
        for number, event in enumerate(done):
            while len(hosts.opened) < min(5, number + 2):
                await hosts.wait_for_check()
            assert hosts.opened == [str(at) for at in range(min(5, number + 2))]
            event.set()


async def test_open_waits_until_a_sandbox_is_free() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=0, sessions=100)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(hosts.open("late", done))
        hosts.now = MAX_STALL_S - 1
        await hosts.wait_for_check()
        assert hosts.opened == []
        hosts.capacity = HostCapacity(at_once=2, sandboxes=1, sessions=100)
        done.set()
        await opening
    assert hosts.opened == ["late"]


async def test_open_continues_without_a_free_sandbox_after_a_long_stall() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=0, sessions=100)), asyncio.Event()
    done.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(hosts.open("patient", done))
        await hosts.wait_for_check()
        hosts.queue.record_end()
        hosts.now = MAX_STALL_S + 1
        hosts.queue.record_end()
        await hosts.wait_for_check()
        assert hosts.opened == []
        hosts.now = 2 * MAX_STALL_S + 1
    assert hosts.opened == ["patient"]


async def test_open_waits_without_limit_while_hosts_have_no_session_capacity() -> None:
    hosts, done = Hosts(HostCapacity(at_once=2, sandboxes=0, sessions=0)), asyncio.Event()
    opening = asyncio.create_task(hosts.open("never", done))
    hosts.now = 100 * MAX_STALL_S
    await hosts.wait_for_check()
    await hosts.wait_for_check()
    assert hosts.opened == []
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # A session that leaves the queue does not block other sessions.
    hosts.capacity, _ = None, done.set()
    await hosts.open("next", done)
    assert hosts.opened == ["next"]


async def test_open_waits_during_a_redis_outage() -> None:
    hosts, done = Hosts(BrokerUnavailable("away")), asyncio.Event()
    done.set()
    async with asyncio.TaskGroup() as group:
        for name in ("one", "two"):
            group.create_task(hosts.open(name, done))
        await hosts.wait_for_check()
        assert hosts.opened == []
        hosts.capacity = HostCapacity(at_once=1, sandboxes=1, sessions=1)
    assert hosts.opened == ["one", "two"]


async def test_refused_tenant_does_not_delay_the_next_open() -> None:
    hosts, done = Hosts(ToolFailure(ErrorCode.UNKNOWN_TENANT, "no")), asyncio.Event()
    with pytest.raises(ToolFailure):
        await hosts.open("stranger", done)
    hosts.capacity = None
    done.set()
    await hosts.open("known", done)
    assert hosts.opened == ["known"]


async def test_queue_of_one_tenant_does_not_delay_another() -> None:
    hosts, may_end, free = Hosts(HostCapacity(at_once=1, sandboxes=9, sessions=9)), asyncio.Event(), asyncio.Event()
    free.set()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        stack.callback(may_end.set)
        group.create_task(hosts.open("first", may_end))
        group.create_task(hosts.open("second", may_end))
        while not hosts.opened:
            await hosts.wait_for_check()
        await hosts.open("other", free, tenant="zoo")
        assert hosts.opened == ["first", "other"]
        may_end.set()
