"""The real worker without sandboxes. Its calls run, Celery enforces their limits, and calls can be cancelled. No
state of a call reaches the next call.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.records.builders import build_attempt
from tests.support.redis.raw_queue import make_envelope, open_dispatcher
from tests.support.stack.service_process import run_program
from tests.support.stack.stack import Footprint, Stack, children_of, is_alive, open_footprint, open_redis_server
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import POOL_GRACE_S, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import POOL_WEB, call_key, catalog_key, control_queue
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.dispatch.celery_transport import CeleryTransport
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.transport import DeliveryFailed
from toolcrew.orchestrator.operations.local_stack import WEB_CONCURRENCY
from toolcrew.orchestrator.sdk.call_control import CallControl
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.audit import local_actor
from toolcrew.store.call_messages import ResultHub
from toolcrew.store.connection import open_redis

pytestmark = pytest.mark.stack

UNUSED_QUEUE_ROUTE = ("acme", None, "a queue without workers")


@dataclass
class Pool:
    """A Redis and one worker without sandboxes, two calls at a time."""

    broker: BrokerSettings
    worker: "subprocess.Popen[bytes]"
    footprint: Footprint

    def open_redis(self) -> "redis.Redis":
        return redis.Redis.from_url(self.broker.redis_url.get_secret_value(), socket_timeout=10)

    def mark(self, name: str) -> Path:
        return self.footprint.folder / name


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    argv = [sys.executable, "-m", "tests.support.stack.tool_worker"]
    with open_redis_server() as server, open_footprint() as footprint:
        settings = {"TOOLCREW_REDIS_URL": server.url, "TOOLCREW_CONCURRENCY": "2", "TOOLCREW_WORKER_KIND": "web"}
        with run_program(footprint, "worker", argv, settings) as worker:
            opened = Pool(BrokerSettings.model_validate({"redis_url": server.url}), worker, footprint)
            log = footprint.folder / "worker.log"
            with opened.open_redis() as store:
                wait_until(lambda: store.exists(catalog_key("default", "web")), SOON_S, log.read_text)
            yield opened
        assert worker.returncode == 0


@pytest.fixture
async def dispatcher(pool: Pool) -> Any:
    async with open_dispatcher(pool.broker) as opened:
        yield opened


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id=os.urandom(8).hex(), name=name, arguments=arguments)


async def call_where_tool(dispatcher: Dispatcher) -> ToolResult:
    return await dispatcher.dispatch(Request(call("where_tool"), *UNUSED_QUEUE_ROUTE))


async def wait_for_file(path: Path) -> None:
    await wait_until_async(path.exists, SOON_S, f"{path.name} is there")


async def cancel_and_wait(running: "asyncio.Task[ToolResult]") -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("tool", ["where_tool", "operators_tool"])
async def test_a_call_runs_in_the_pool_of_its_tool_with_tenant_session_and_limit(
    dispatcher: Dispatcher, tool: str
) -> None:
    result = await dispatcher.dispatch(Request(call(tool), "acme", "s1", "a queue without workers", timeout_s=7))

    fields = {name: result.metadata[name] for name in ("tenant", "session", "limit_s")}
    assert (result.success, fields) == (True, {"tenant": "acme", "session": "s1", "limit_s": 7.0})
    assert result.sandbox is None


async def test_a_tool_that_needs_a_sandbox_is_refused_in_a_pool_without_sandboxes(dispatcher: Dispatcher) -> None:
    result = await dispatcher.dispatch(Request(call("grasping_tool"), *UNUSED_QUEUE_ROUTE))

    assert (result.error_code, "pool without sandboxes" in (result.error or "")) == (
        ErrorCode.SANDBOX_UNAVAILABLE,
        True,
    )


async def test_a_call_at_its_limit_can_clean_up_and_its_process_continues(pool: Pool, dispatcher: Dispatcher) -> None:
    mark, started = pool.mark("limited"), time.monotonic()
    result = await dispatcher.dispatch(Request(call("wait_tool", path=str(mark)), *UNUSED_QUEUE_ROUTE, timeout_s=0.5))

    assert (result.error_code, result.error) == (
        ErrorCode.TIMEOUT,
        "wait_tool did not end within its limit of 0.5 s and was stopped",
    )
    assert time.monotonic() - started > 0.4
    assert result.clocks.run_s > 0.4
    assert mark.with_suffix(".cleaned").exists()
    assert is_alive(int(mark.with_suffix(".began").read_text()))


async def test_an_unstoppable_call_is_killed_at_its_limit_or_on_cancel_and_its_process_replaced(
    pool: Pool, dispatcher: Dispatcher
) -> None:
    limited, dropped = pool.mark("stubborn-limited"), pool.mark("stubborn-dropped")
    first = asyncio.create_task(
        dispatcher.dispatch(Request(call("stubborn_tool", path=str(limited)), *UNUSED_QUEUE_ROUTE, timeout_s=0.3))
    )
    cancelled_call = call("stubborn_tool", path=str(dropped))
    second = asyncio.create_task(dispatcher.dispatch(Request(cancelled_call, *UNUSED_QUEUE_ROUTE)))
    await wait_for_file(limited.with_suffix(".began"))
    await wait_for_file(dropped.with_suffix(".began"))
    pids = {int(mark.with_suffix(".began").read_text()) for mark in (limited, dropped)}

    await cancel_and_wait(second)
    result = await first
    await wait_until_async(lambda: not any(map(is_alive, pids)), POOL_GRACE_S + 5, "both are gone")

    assert result.error_code is ErrorCode.TIMEOUT
    assert "its process was killed; it may have acted" in (result.error or "")
    with pool.open_redis() as store:
        key = call_key("default", "acme", cancelled_call.id)
        await wait_until_async(lambda: store.hget(key, "state") == b"lost", SOON_S, "no record says `running`")
    served = {(await call_where_tool(dispatcher)).metadata["pid"] for _ in range(3)}
    assert served
    assert served & pids == set()


async def test_a_cancelled_call_ends_at_once_and_can_clean_up(pool: Pool, dispatcher: Dispatcher) -> None:
    mark = pool.mark("cancelled")
    running = asyncio.create_task(dispatcher.dispatch(Request(call("wait_tool", path=str(mark)), *UNUSED_QUEUE_ROUTE)))
    await wait_for_file(mark.with_suffix(".began"))

    await cancel_and_wait(running)

    await wait_for_file(mark.with_suffix(".cleaned"))
    assert is_alive(int(mark.with_suffix(".began").read_text()))
    assert (await call_where_tool(dispatcher)).success


@dataclass
class Program:
    """Another program on the same pool."""

    redis: Any
    dispatcher: Dispatcher


async def test_a_call_is_killed_by_another_program_and_can_clean_up(pool: Pool, dispatcher: Dispatcher) -> None:
    mark = pool.mark("killed-elsewhere")
    one = call("wait_tool", path=str(mark))
    running = asyncio.create_task(dispatcher.dispatch(Request(one, *UNUSED_QUEUE_ROUTE)))
    await wait_for_file(mark.with_suffix(".began"))
    client = open_redis(pool.broker)
    try:
        control = CallControl(Program(client, dispatcher), "default")  # type: ignore[arg-type]
        killed = await control.kill("acme", one.id, local_actor(), "enough")
    finally:
        await client.aclose()
    assert (killed.record.code, killed.already_ended, "enough" in killed.record.killed) == ("CANCELLED", False, True)
    assert (await running).error_code is ErrorCode.CANCELLED
    await wait_for_file(mark.with_suffix(".cleaned"))
    assert (await call_where_tool(dispatcher)).success


async def test_a_call_that_is_cancelled_in_the_queue_never_starts(pool: Pool, dispatcher: Dispatcher) -> None:
    busy = [pool.mark(f"busy-{number}") for number in range(2)]
    running = [
        asyncio.create_task(dispatcher.dispatch(Request(call("wait_tool", path=str(mark)), *UNUSED_QUEUE_ROUTE)))
        for mark in busy
    ]
    for mark in busy:
        await wait_for_file(mark.with_suffix(".began"))
    queued = asyncio.create_task(
        dispatcher.dispatch(Request(call("wait_tool", path=str(pool.mark("queued"))), *UNUSED_QUEUE_ROUTE))
    )
    with pool.open_redis() as store:
        await wait_until_async(lambda: store.llen(POOL_WEB) == 1, SOON_S, "it is queued")

    await cancel_and_wait(queued)
    with pool.open_redis() as store:
        await wait_until_async(lambda: store.llen(control_queue(POOL_WEB)) == 0, SOON_S, "the cancel was read")
    for task in running:
        await cancel_and_wait(task)

    assert (await call_where_tool(dispatcher)).success
    assert (await call_where_tool(dispatcher)).success
    assert not pool.mark("queued").with_suffix(".began").exists()


async def test_a_cancel_of_another_tenant_or_with_a_forged_signature_has_no_effect(
    pool: Pool, dispatcher: Dispatcher
) -> None:
    """The attacker's aim: end calls of others."""
    mark, victim = pool.mark("victim"), "victims-call"
    running = asyncio.create_task(
        dispatcher.dispatch(
            Request(ToolCall(id=victim, name="wait_tool", arguments={"path": str(mark)}), *UNUSED_QUEUE_ROUTE)
        )
    )
    await wait_for_file(mark.with_suffix(".began"))
    order = call("session.cancel", call_id=victim)

    await dispatcher.send_order(order, "rival", None, POOL_WEB)
    forged = make_envelope(pool.broker, order, tenant="acme", session="s1", key=SigningKeys.of("a guess"))
    with pool.open_redis() as store:
        store.lpush(control_queue(POOL_WEB), forged)
        await wait_until_async(lambda: store.llen(control_queue(POOL_WEB)) == 0, SOON_S, "the orders were read")
    assert (await call_where_tool(dispatcher)).success

    assert not mark.with_suffix(".cleaned").exists()
    await cancel_and_wait(running)
    await wait_for_file(mark.with_suffix(".cleaned"))


async def test_a_call_whose_process_dies_has_an_unknown_outcome(pool: Pool, dispatcher: Dispatcher) -> None:
    mark = pool.mark("killed")
    running = asyncio.create_task(dispatcher.dispatch(Request(call("wait_tool", path=str(mark)), *UNUSED_QUEUE_ROUTE)))
    await wait_for_file(mark.with_suffix(".began"))

    pid = int(mark.with_suffix(".began").read_text())
    assert pid in children_of(pool.worker.pid)
    os.kill(pid, signal.SIGKILL)

    assert (await running).error_code is ErrorCode.OUTCOME_UNKNOWN
    assert (await call_where_tool(dispatcher)).success


async def test_a_tool_of_another_pool_is_not_found(pool: Pool) -> None:
    misled = call("bash_tool", command="true")
    envelope = make_envelope(pool.broker, misled, tenant="acme", session="s1")
    client = open_redis(pool.broker)
    hub = ResultHub(client)
    await hub.start()
    transport = CeleryTransport(pool.broker, hub)
    try:
        with pytest.raises(DeliveryFailed) as failed:
            await transport.deliver(
                build_attempt("bash_tool", queue=POOL_WEB, call_id=misled.id, envelope=envelope, wait_s=20)
            )
    finally:
        await transport.aclose()
        await hub.close()
        await client.aclose()
    assert (failed.value.code, failed.value.message) == (ErrorCode.TOOL_NOT_FOUND, "Tool not found: bash_tool")
    with pool.open_redis() as store:
        key = call_key("default", "acme", misled.id)
        await wait_until_async(
            lambda: store.hget(key, "state") == b"forbidden", SOON_S, "it is noted that it will not start"
        )


async def test_a_session_of_an_embedded_stack_reaches_the_web_pool(stack: Stack, session: Session) -> None:
    web = await session.call("webfetch_tool", {"url": "http://127.0.0.1:9/"})
    command = await session.call("bash_tool", {"command": "echo on"})

    assert (web.error_code, web.sandbox) == (ErrorCode.SECURITY_REFUSED, None)
    assert (command.success, command.sandbox is not None) == (True, True)
    assert len(children_of(stack.pid("web"))) == WEB_CONCURRENCY
