"""Ending calls from any process: a waiting call never starts, and a running call is ended on its host."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.names import audit_key, call_key, kills_key
from toolcrew.orchestrator.dispatch import call_monitor
from toolcrew.orchestrator.dispatch.call_monitor import CallMonitor
from toolcrew.orchestrator.dispatch.transport import DeliveryFailed
from toolcrew.orchestrator.sdk import call_control as control_module
from toolcrew.orchestrator.sdk.call_control import CallControl
from toolcrew.store.audit import Actor
from toolcrew.store.call_records import CallState, KillOrder
from toolcrew.store.calls import CallStore
from toolcrew.store.hosts import HostStore

ANNE = Actor(key="k1", role="operator", name="anne")


@dataclass
class FakeDispatcher:
    """Replaces a dispatcher: records the orders for hosts and performs their effects."""

    perform: Callable[[ToolCall], Awaitable[None]]
    sent_orders: list[tuple[ToolCall, tuple[str, str | None, str | None]]] = field(default_factory=list)

    async def send_order(self, call: ToolCall, tenant: str, session: str | None, queue: str | None = None) -> None:
        self.sent_orders.append((call, (tenant, session, queue)))
        await self.perform(call)


@dataclass
class Pool:
    redis: Any
    dispatcher: Any


class Harness:
    """One deployment, with calls that the test makes by hand."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.kills = CallStore(client, "d")
        self.monitor = CallMonitor(self.kills, HostStore(client, "d"), lambda task_id, error: None)
        self.orders = FakeDispatcher(self._end)
        self.control = CallControl(Pool(client, self.orders), "d")  # type: ignore[arg-type]

    async def note(self, call: str = "c1", tenant: str = "acme", **fields: Any) -> None:
        defaults = {"state": "queued", "attempt": 1, "queue": "host.a.b1", "task": "t1", "session": "s1"}
        await self.client.hset(
            call_key("d", tenant, call), mapping={name: str(value) for name, value in {**defaults, **fields}.items()}
        )

    async def state(self, call: str = "c1", tenant: str = "acme") -> str:
        result = await self.client.hget(call_key("d", tenant, call), "state")
        return result.decode() if result else ""

    async def audit_entries(self) -> list[dict[str, Any]]:
        return [json.loads(fields[b"entry"]) for _, fields in await self.client.xrange(audit_key("d"))]

    async def _end(self, order: ToolCall) -> None:
        """End the call as the worker on its host does."""
        await self.note(str(order.arguments["call_id"]), state="done", code="CANCELLED")


@pytest.fixture
async def harness(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(call_monitor, "KILLS_EVERY_S", 0.02)
    monkeypatch.setattr(control_module, "LOOKUP_S", 1.0)
    monkeypatch.setattr(control_module, "REPEAT_ORDER_S", 0.1)
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5)
    opened = Harness(client)
    await opened.monitor.start()
    with capture_logs():
        yield opened
    await opened.monitor.close()
    await client.aclose()


async def result_of(code: ErrorCode | None = None, **fields: Any) -> ToolResult:
    return ToolResult(
        call_id="c1",
        name="bash_tool",
        success=code is None,
        error_code=code,
        error="killed" if code else None,
        **fields,
    )


async def wait_forever() -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_killed_queued_call_never_starts_and_names_the_actor_and_reason(harness: Harness) -> None:
    await harness.note()
    call = asyncio.create_task(harness.monitor.watch("acme", "c1", wait_forever()))
    killed = await harness.control.kill("acme", "c1", ANNE, "it runs away")
    assert (killed.record.state, killed.record.code, killed.already_ended) == (CallState.FORBIDDEN, "CANCELLED", False)
    with pytest.raises(ToolFailure, match="killed by anne: it runs away; the call had not begun") as failure:
        await asyncio.wait_for(call, SOON_S)
    assert failure.value.code is ErrorCode.CANCELLED
    assert harness.orders.sent_orders == []


async def test_a_kill_of_an_unknown_call_fails_at_once_and_applies_later(harness: Harness) -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(ToolFailure, match="call c1 of tenant acme was not found"):
        await harness.control.kill("acme", "c1", ANNE, lookup_s=0.0)
    assert asyncio.get_running_loop().time() - started < control_module.LOOKUP_S
    assert await harness.audit_entries() == []
    # A call that its program was about to make also never starts, even if the program has read the order before.
    with harness.monitor._stoppable("acme", "other"):
        await harness.monitor.find_kills()
    await harness.monitor.find_kills()
    with pytest.raises(ToolFailure, match="killed by anne"):
        await asyncio.wait_for(harness.monitor.watch("acme", "c1", wait_forever()), SOON_S)


async def test_the_kill_order_is_repeated_until_the_call_ends(harness: Harness) -> None:
    """The order may reach the host before the call does."""
    await harness.note(state="running", holder="host.b.b2/w1")

    async def end_at_third_order(order: ToolCall) -> None:
        if len(harness.orders.sent_orders) == 3:
            await harness.note(state="done", code="CANCELLED")

    harness.orders.perform = end_at_third_order
    await asyncio.wait_for(harness.control.kill("acme", "c1", ANNE), SOON_S)
    assert len(harness.orders.sent_orders) == 3


KILLED = "the call was killed by anne"


@pytest.mark.parametrize(
    ("killed", "outcome", "code", "error"),
    [
        (f"{KILLED}: enough", {"code": ErrorCode.CANCELLED}, ErrorCode.CANCELLED, f"{KILLED}: enough; killed"),
        (
            KILLED,
            {"metadata": {"cancelled": True, "returncode": -15}},
            ErrorCode.CANCELLED,
            f"{KILLED}; its processes were ended",
        ),
        (KILLED, {}, None, None),
        (KILLED, {"code": ErrorCode.TIMEOUT}, ErrorCode.TIMEOUT, "killed"),
        ("", {"code": ErrorCode.CANCELLED}, ErrorCode.CANCELLED, "killed"),
    ],
    ids=["killed", "killed program", "succeeded", "timed out", "cancelled"],
)
async def test_only_a_result_ended_by_a_kill_names_the_kill(
    harness: Harness, killed: str, outcome: dict[str, Any], code: ErrorCode | None, error: str | None
) -> None:
    await harness.note(state="done", killed=killed)
    result = await harness.monitor.watch("acme", "c1", result_of(**outcome, output="so far"))
    assert (result.error_code, result.error, result.output) == (code, error, "so far")
    assert result.success == (code is None)


async def test_a_killed_call_with_a_lost_host_has_an_unknown_outcome(harness: Harness) -> None:
    await harness.note(state="unknown", killed="the call was killed by anne")

    async def lose() -> ToolResult:
        raise DeliveryFailed(ErrorCode.OUTCOME_UNKNOWN, "its host is gone")

    with pytest.raises(DeliveryFailed, match="killed by anne; its host is gone") as failure:
        await harness.monitor.watch("acme", "c1", lose())
    assert failure.value.code is ErrorCode.OUTCOME_UNKNOWN


async def test_a_killed_running_call_waits_for_the_result_of_its_host(harness: Harness) -> None:
    await harness.note(state="running", holder="host.b.b2/w1")
    ended = asyncio.Event()

    async def serve() -> ToolResult:
        await ended.wait()
        return await result_of(ErrorCode.CANCELLED)

    call = asyncio.create_task(harness.monitor.watch("acme", "c1", serve()))
    await asyncio.sleep(0)
    await harness.kills.kill(KillOrder(tenant="acme", call="c1", by="anne"))
    await harness.monitor.find_kills()
    assert not call.done()
    ended.set()
    assert "killed by anne" in str((await call).error)


async def test_a_killed_call_is_not_sent_again_after_host_loss(harness: Harness) -> None:
    await harness.note(state="lost")
    ledger = CallStore(harness.client, "d")
    assert (await harness.control.kill("acme", "c1", ANNE)).record.state is CallState.LOST
    await harness.control.kill("acme", "c1", ANNE, "again")
    assert len(await harness.audit_entries()) == 1
    assert await ledger.renew("acme", "c1", 1) is False
    await harness.note("c2", state="lost")
    assert await ledger.renew("acme", "c2", 1) is True


async def test_a_kill_does_not_affect_an_equal_call_id_of_another_tenant(harness: Harness) -> None:
    """The attacker's aim: to end another tenant's call by its id."""
    await harness.note(tenant="bolt")
    other = asyncio.create_task(harness.monitor.watch("bolt", "c1", wait_forever()))
    await asyncio.sleep(0)
    with pytest.raises(ToolFailure, match="call c1 of tenant acme was not found"):
        await harness.control.kill("acme", "c1", ANNE)
    assert (await harness.state(tenant="bolt"), other.done()) == ("queued", False)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize("call_id", ["never-was", "", "x" * 65, "c1:events", "*", "c1\n"])
async def test_a_kill_of_an_invalid_or_unknown_call_id_writes_nothing(harness: Harness, call_id: str) -> None:
    with pytest.raises(ToolFailure) as refused:
        await harness.control.kill("acme", call_id, ANNE)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert [await harness.audit_entries(), await harness.client.exists(call_key("d", "acme", call_id))] == [[], 0]


async def test_each_kill_is_audited_once(harness: Harness) -> None:
    await harness.note()
    await harness.note("c2", state="running", holder="host.b.b2/w1")
    for call in ("c1", "c1", "c2", "c2"):
        await harness.control.kill("acme", call, ANNE, "enough")
    entries = await harness.audit_entries()
    assert [(one["action"], one["target"], one["tenant"], one["details"]["reason"]) for one in entries] == [
        ("call.kill", "c1", "acme", "enough"),
        ("call.kill", "c2", "acme", "enough"),
    ]


async def test_the_task_of_a_killed_call_can_continue(harness: Harness) -> None:
    """The cancellation is the kill's own and leaves nothing behind."""

    async def work() -> str:
        with pytest.raises(ToolFailure):
            await harness.monitor.watch("acme", "c1", wait_forever())
        await asyncio.sleep(0)
        task = asyncio.current_task()
        return f"continued {task.cancelling() if task is not None else None}"

    running = asyncio.create_task(work())
    await asyncio.wait_for(harness.control.kill("acme", "c1", ANNE), SOON_S)
    assert await asyncio.wait_for(running, SOON_S) == "continued 0"


async def test_the_number_of_stored_kill_orders_is_bounded(harness: Harness) -> None:
    """The attacker's aim: to fill Redis, and to flood every program with orders."""
    for number in range(1100):
        await harness.kills.kill(KillOrder(tenant="acme", call=f"c{number}", by="anne"))
    assert await harness.client.zcard(kills_key("d")) == 1000
    assert await harness.client.ttl(kills_key("d")) > 0


async def test_invalid_kill_orders_are_ignored(harness: Harness) -> None:
    await harness.client.zadd(kills_key("d"), {b"\xff{": 1.0, b'{"tenant": "acme", "call": "c1"}': 2.0})
    assert await harness.kills.recent_kills(0.0) == []


async def test_a_kill_with_unreachable_redis_is_reported() -> None:
    client = redis.asyncio.Redis.from_url("redis://127.0.0.1:1/0", socket_timeout=1)
    with pytest.raises(BrokerUnavailable, match="the call was not killed"):
        await CallStore(client, "d").kill(KillOrder(tenant="acme", call="c1", by="anne"))
    await client.aclose()


async def test_a_kill_of_an_ended_call_changes_nothing(harness: Harness) -> None:
    await harness.note(state="done", code="TIMEOUT")
    killed = await harness.control.kill("acme", "c1", ANNE)
    assert (killed.already_ended, killed.record.code, killed.record.killed) == (True, "TIMEOUT", "")
    assert await harness.audit_entries() == []


async def test_a_killed_call_that_still_runs_is_reported(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "END_TIMEOUT_S", 0.2)
    await harness.note(state="running", holder="host.b.b2/w1")

    async def ignore(order: ToolCall) -> None:
        """Ignore the order, as a lost host does."""

    harness.orders.perform = ignore
    with pytest.raises(OperatorError, match="was killed but still runs"):
        await asyncio.wait_for(harness.control.kill("acme", "c1", ANNE), SOON_S)
