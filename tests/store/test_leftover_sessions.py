"""Sandboxes of sessions that ended while their host was unreachable. They are removed, and no other sandbox is
removed.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest
import redis
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import build_context
from tests.support.sandboxd.fake_host import DEPLOYMENT, HostHarness, MemorySandboxd
from tests.support.stack.waiting import until
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.names import location_key, tenant_sessions_key
from toolcrew.store.call_records import CallClaim
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.sessions import CLOSED_MARGIN_S, SessionStore
from toolcrew.workers.duties import Duty
from toolcrew.workers.host_duties import LeftoverMonitor


class Host:
    """A host with sessions that is checked one round at a time, and the session locations of an orchestrator."""

    def __init__(self, harness: HostHarness, client: "redis.asyncio.Redis") -> None:
        self.harness = harness
        self.client = client
        self.orchestrator = SessionStore(client, DEPLOYMENT)
        self.sandboxd = MemorySandboxd()
        self.sessions = harness.sessions()
        self.stop = threading.Event()
        self.sweep = LeftoverMonitor(self.sessions)

    async def open(self, session: str, queue: str = "host.a.b1", **row: object) -> None:
        """Open a session: a location, and a sandbox on this host, whichever host the location names."""
        await self.orchestrator.open("acme", session, queue, start="{}", ttl_s=60.0, limit=10)
        self.sandboxd.add(f"acme:{session}", **row)

    def look(self) -> int:
        with capture_logs(), self.sandboxd.client() as client:
            return self.sweep.run_round(client)


@pytest.fixture
async def host(redis_server: RedisProcess) -> AsyncIterator[Host]:
    async with redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) as client:
        yield Host(HostHarness(redis_server), client)


async def test_sandbox_of_a_session_closed_during_a_host_outage_is_removed(host: Host) -> None:
    await host.open("ended")
    await host.open("used")
    await host.orchestrator.close("acme", "ended")
    assert (host.look(), host.look()) == (1, 0)
    assert list(host.sandboxd.rows) == ["acme:used"]


async def test_sandbox_created_after_its_session_ended_or_moved_is_removed(host: Host) -> None:
    """The session was given up while its sandbox was being created. The session then ended, or was opened on another
    host.
    """
    await host.open("elsewhere", "host.b.b1")
    await host.orchestrator.close("acme", "never-placed")
    host.sandboxd.add("acme:never-placed")
    assert host.look() == 2
    assert not host.sandboxd.rows


async def test_sandbox_without_a_closed_session_in_redis_is_kept(host: Host) -> None:
    """Redis may have been flushed, or be used by a program that needs no queue."""
    host.sandboxd.add("acme:unknown")
    await host.open("here")
    await host.open("of-an-earlier-worker", "host.a.b0")
    await host.client.hset(location_key(DEPLOYMENT, "acme", "here"), "state", "moving")
    assert host.look() == 0
    await host.client.flushall()
    assert host.look() == 0
    assert len(host.sandboxd.rows) == 3


async def test_sandbox_of_another_tenant_with_the_same_session_name_is_kept(host: Host) -> None:
    await host.open("s1")
    await host.orchestrator.close("rival", "s1")
    assert host.look() == 0


async def test_session_that_returns_during_the_check_keeps_its_sandbox(host: Host) -> None:
    await host.open("s1", "host.b.b1", fence=1)
    find = host.sessions.find_ended

    def find_ended_while_reopened(names: list[str]) -> set[str]:
        ended = find(names)
        host.sandboxd.add("acme:s1", fence=3)
        return ended

    host.sessions.find_ended = find_ended_while_reopened  # type: ignore[method-assign, assignment]
    assert host.look() == 0
    assert host.sandboxd.rows["acme:s1"]["fence"] == 3


async def test_closed_session_does_not_count_and_cannot_be_reopened(host: Host) -> None:
    await host.open("s1")
    await host.orchestrator.close("acme", "s1")
    assert await host.orchestrator.find("acme", "s1") is None
    assert await host.client.scard(tenant_sessions_key(DEPLOYMENT, "acme")) == 0
    with pytest.raises(ToolFailure, match="closed before it was opened: open a new session") as refused:
        await host.open("s1")
    assert refused.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_open_call_for_a_closed_session_is_not_run(host: Host) -> None:
    await host.open("s1")
    await host.orchestrator.close("acme", "s1")
    ledger = WorkerCallStore(host.harness.redis, DEPLOYMENT, host.harness.clock)
    call, context = ToolCall(id="c1", name="session.open"), build_context(tenant="acme", session="s1", fence=1)
    assert await asyncio.to_thread(ledger.claim, call, context, "host.a.b1#w1") is CallClaim.MOVED


async def test_closed_record_outlives_the_sandbox_lifetime(host: Host) -> None:
    await host.open("s1")
    for _ in range(2):
        await host.orchestrator.close("acme", "s1")
        assert 60 < await host.client.ttl(location_key(DEPLOYMENT, "acme", "s1")) <= 60 + CLOSED_MARGIN_S


async def test_leftover_check_is_repeated_after_an_outage(host: Host) -> None:
    await host.open("s1")
    await host.orchestrator.close("acme", "s1")
    find, has_failed, failures = (
        host.sessions.find_ended,
        threading.Event(),
        [BrokerUnavailable("away"), SandboxUnavailable("away")],
    )

    def fail_then_find(names: list[str]) -> set[str]:
        if failures:
            has_failed.set()
            raise failures.pop()
        return find(names)

    host.sessions.find_ended = fail_then_find  # type: ignore[method-assign, assignment]
    with capture_logs():
        duty = Duty(
            "leftovers", 0.01, partial(host.sweep.run_round, host.sandboxd.client()), "leftovers_not_closed", host.stop
        )
        duty.start()
        assert await asyncio.to_thread(has_failed.wait, 20)
        await until(lambda: not host.sandboxd.rows)
        host.stop.set()
        await asyncio.to_thread(duty.join, 20)
    assert host.sandboxd.closed == ["acme:s1"]
