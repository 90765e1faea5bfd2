"""Simulated agents on orchestrators with the product's code, over simulated hosts.

Admission, placement, publishing, call store, monitor, reaper and recovery are the product's own.
"""

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from benchmarks.simulator_clock import CountingScripts
from benchmarks.simulator_hosts import DEPLOYMENT, KEYS, OPEN_S, World
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.hosts import HOST_LOST_TYPE, HOST_TTL_S, HostReport
from toolcrew.contract.names import call_key
from toolcrew.contract.session_spec import EMPTY_SESSION
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.orchestrator.dispatch.call_monitor import LOSSES_EVERY_S, CallMonitor
from toolcrew.orchestrator.dispatch.celery_transport import build_message
from toolcrew.orchestrator.dispatch.delivery import Delivery, Pool
from toolcrew.orchestrator.dispatch.request import Attempt, CheckedRequest
from toolcrew.orchestrator.dispatch.session_locator import OpenRequest, SessionLocator
from toolcrew.orchestrator.dispatch.transport import CallLost, DeliveryFailed
from toolcrew.store.call_messages import NotSent, Publisher, ResultHub
from toolcrew.store.calls import CallStore
from toolcrew.store.clock import SharedClock
from toolcrew.store.hosts import FRESH_S, HostStore
from toolcrew.store.sessions import SessionAddress, SessionStore

FUTURE_AT = 4_000_000_000.0
"""Start of the simulated clock, as a Unix timestamp. The start is far ahead of the clock of Redis, so that no
deadline of a call has passed for Redis.
"""
WAIT_S = 300.0
"""Longest wait of a call for a slot, in seconds."""
SPECS = {
    is_idempotent: ToolSpec(
        name="read_tool" if is_idempotent else "bash_tool",
        description="Played.",
        parameters={"type": "object"},
        idempotent=is_idempotent,
    )
    for is_idempotent in (True, False)
}


@dataclass
class Session:
    """Session of one agent, which alternates between thinking and calling."""

    tenant: str
    name: str
    policy: TenantPolicy


@dataclass
class CallResults:
    """Results that the callers received. `moved_s`: for each session that moved, the seconds from the end of its host
    until the session was open elsewhere.
    """

    calls: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    idempotent: dict[str, bool] = field(default_factory=dict)
    longest_s: float = 0.0
    moved_s: list[float] = field(default_factory=list)
    openings: int = 0
    refused_openings: int = 0
    lived: dict[str, str] = field(default_factory=dict)
    """Session -> queue of its host."""


class _Hosts:
    """Host store of the simulation. The store reads the reports again when its copy is FRESH_S old."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reports = list[HostReport]()
        self._read_at = float("-inf")

    async def reports(self) -> list[HostReport]:
        if self._world.loop.time() - self._read_at >= FRESH_S:
            self._reports, self._read_at = list(self._world.reports.values()), self._world.loop.time()
        return self._reports

    async def silent(self) -> list[str]:
        return []


class _Transport:
    """Transport to simulated hosts, in place of CeleryTransport."""

    def __init__(self, world: World, publisher: Publisher, hub: ResultHub, monitor: CallMonitor) -> None:
        self._world = world
        self._publisher = publisher
        self._hub = hub
        self._monitor = monitor

    async def deliver(self, attempt: Attempt) -> Any:
        task_id = self._hub.task_id(f"{attempt.call_id}.{attempt.number}")
        with self._hub.expect(task_id) as stored:
            record = call_key(DEPLOYMENT, attempt.tenant, attempt.call_id)
            await self._publisher.publish(attempt, task_id, build_message(attempt, task_id, record))
            self._world.start_calls(attempt.queue)
            with self._monitor.over(task_id, attempt):
                async with asyncio.timeout(attempt.request.wait_s):
                    ended = await stored
        if ended["status"] == "SUCCESS":
            return ended["result"]
        if ended["result"]["exc_type"] == HOST_LOST_TYPE:
            raise CallLost(str(ended["result"]["exc_message"]), has_started=False)
        raise DeliveryFailed(ErrorCode.INTERNAL, str(ended["result"]))

    def settle(self, tenant: str, call_id: str) -> None:
        """Do nothing: no call here keeps its result."""

    async def send_order(self, queue: str, envelope: str) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Do nothing: the orchestrator owns the connections."""


class Orchestrator:
    """Components of one orchestrator process."""

    def __init__(
        self,
        world: World,
        client: "redis.asyncio.Redis",
        hub: ResultHub,
        monitor: CallMonitor,
        admission: SharedAdmission,
        scripts: CountingScripts,
        results: CallResults,
    ) -> None:
        self._world = world
        self._results = results
        self._clock = SharedClock(lambda: FUTURE_AT + world.loop.time())
        transport = _Transport(world, Publisher(scripts, DEPLOYMENT, SharedClock()), hub, monitor)
        self.admission = admission
        pool = Pool(
            SessionStore(client, DEPLOYMENT), _Hosts(world), CallStore(client, DEPLOYMENT), admission, clock=self._clock
        )
        self.locator = SessionLocator(pool.sessions, pool.hosts, self._send_open, KEYS)
        self._delivery = Delivery(transport, KEYS, pool, self.locator)

    async def open(self, session: Session) -> bool:
        """Open the session. Return whether the session is open."""
        self._results.openings += 1
        try:
            result = await self.locator.open(session.tenant, session.name, session.policy, EMPTY_SESSION)
        except OperatorError:
            result = None
        if result is None or not result.success:
            self._results.refused_openings += 1
            return False
        return True

    async def call(self, session: Session, seconds: float, *, is_idempotent: bool) -> str:
        """Make a call and return the code of its result, or "" for success."""
        call = ToolCall(id=secrets.token_hex(8), name=SPECS[is_idempotent].name, arguments={"seconds": seconds})
        now, began = self._clock(), self._world.loop.time()
        request = CheckedRequest(
            call=call,
            tenant=session.tenant,
            session=session.name,
            worker_call=call,
            spec=SPECS[is_idempotent],
            policy=session.policy,
            queue_wait_s=WAIT_S,
            context=ToolContext(
                tenant=session.tenant, session=session.name, sent_at=now, deadline_at=now + WAIT_S, timeout_s=60
            ),
        )
        self._results.idempotent[call.id] = is_idempotent
        try:
            result = await self._delivery.deliver(request)
            code = "" if result.success else str(result.error_code)
        except (ToolFailure, DeliveryFailed, OperatorError) as error:
            code = error.code.value
        self._results.calls += 1
        self._results.codes[code] += 1
        self._results.longest_s = max(self._results.longest_s, self._world.loop.time() - began)
        return code

    async def _send_open(self, opening: OpenRequest, address: SessionAddress) -> ToolResult:
        call = ToolCall(id=secrets.token_hex(8), name="session.open")
        await asyncio.sleep(OPEN_S)
        has_room = self._world.open_session(address.queue)
        if has_room is None:
            if not self._world.is_reported(address.queue):
                raise NotSent("host_lost")
            await asyncio.sleep(HOST_TTL_S + LOSSES_EVERY_S)
            raise CallLost("the host is gone", has_started=False)
        if not has_room:
            return ToolResult.failed(call, ErrorCode.SANDBOX_UNAVAILABLE, "the host is full")
        if opening.moved is not None:
            self._results.moved_s.append(
                self._world.loop.time() - self._world.stopped_at[self._results.lived[opening.session]]
            )
        self._results.lived[opening.session] = address.queue
        return ToolResult(call_id=call.id, name=call.name, success=True)


@asynccontextmanager
async def open_orchestrators(
    world: World, client: "redis.asyncio.Redis", number: int, results: CallResults
) -> AsyncIterator[list[Orchestrator]]:
    """Start orchestrators that share one Redis and have no other connection."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(number):
            hub = ResultHub(client)
            await hub.start()
            stack.push_async_callback(hub.close)
            monitor = CallMonitor(
                CallStore(client, DEPLOYMENT), HostStore(client, DEPLOYMENT), hub.fail, clock=world.loop.time
            )
            await monitor.start()
            stack.push_async_callback(monitor.close)
            scripts = CountingScripts(client)
            stack.push_async_callback(scripts.aclose)
            admission = SharedAdmission(
                client, DEPLOYMENT, clock=lambda: FUTURE_AT + world.loop.time(), scripts=scripts
            )
            stack.push_async_callback(admission.aclose)
            made.append(Orchestrator(world, client, hub, monitor, admission, scripts, results))
        yield made


@dataclass(frozen=True)
class Pace:
    """Random pace of the agents: seconds between calls, and seconds of a call, plus or minus one half."""

    think_s: float
    call_s: float

    @property
    def demand(self) -> float:
        """Return the average number of slots that one agent uses if it never waits."""
        return self.call_s / (self.call_s + self.think_s)


async def play_agent(
    orchestrator: Orchestrator, session: Session, chance: random.Random, pace: Pace, over: asyncio.Event
) -> None:
    """Alternate between thinking and calling until the end of the simulation. A rejected call does not
    end the agent.
    """
    await _think(chance.uniform(0, pace.think_s), over)
    while not over.is_set():
        await orchestrator.call(
            session, chance.uniform(pace.call_s / 2, pace.call_s * 3 / 2), is_idempotent=chance.random() < 0.5
        )
        await _think(chance.expovariate(1 / pace.think_s), over)


async def _think(seconds: float, over: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
