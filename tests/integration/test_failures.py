"""Any process may be killed at any time. Every call still gets one result, and nothing continues after it was
reported as ended.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import redis
from docker import APIClient

from tests.support.sandboxd.containers import watch
from tests.support.stack.stack import (
    RedisServer,
    Stack,
    all_of,
    children_of,
    commands_in,
    is_alive,
    missing,
    open_redis_server,
    open_stack,
)
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import OPERATOR_CODES, ErrorCode, OperatorError
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dispatch import delivery
from toolcrew.orchestrator.operations.supervision import MAX_ENDS
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack


def need_images() -> None:
    if os.geteuid() != 0:
        missing("workspace images need root: run the tests as root")


async def start_call(
    stack: Stack, session: Session, command: str, call_id: str | None = None
) -> "asyncio.Task[ToolResult]":
    """Start a call and wait until its command runs."""
    container = await stack.container_of(session)
    task = asyncio.create_task(session.call("bash_tool", {"command": command}, call_id=call_id))
    await wait_until_async(
        lambda: any(command in line for line in commands_in(container).values()), SOON_S, f"{command} runs"
    )
    return task


async def test_a_killed_sandboxd_restarts_and_its_sessions_keep_their_files(own_stack: Stack) -> None:
    need_images()
    async with ToolClient.connect(own_stack.redis_url) as client:
        busy, idle = await client.open_session(), await client.open_session()
        for session in (busy, idle):
            assert (await session.call("bash_tool", {"command": "echo content > file"})).success
        call = await start_call(own_stack, busy, "sleep 66")
        before = set(own_stack.footprint.containers())
        assert len(before) == 2
        killed = own_stack.pid("sandboxd")

        os.kill(killed, signal.SIGKILL)

        result = (await all_of([call], 60))[0]
        assert result.success is False
        assert result.error_code in (ErrorCode.SANDBOX_UNAVAILABLE, ErrorCode.OUTCOME_UNKNOWN), result
        assert await asyncio.to_thread(own_stack.wait_for_another, "sandboxd", killed) != killed
        await wait_until_async(
            lambda: not before & set(own_stack.footprint.containers()), SOON_S, "its containers are gone"
        )
        for session in (busy, idle):
            assert await retried(session, "cat file") == "content\n"
    assert "sandboxd ended unexpectedly (SIGKILL) and is started again" in own_stack.errors()
    assert own_stack.end() == 0
    own_stack.footprint.assert_nothing_left()


async def test_a_stack_that_stops_after_its_sandboxd_was_killed_leaves_no_frozen_sandbox(engine: APIClient) -> None:
    """A frozen guest cannot notice the loss of its sandboxd. The next sandboxd must remove the guest before the stack
    ends.
    """
    with open_stack(engine, {"TOOLCREW_IDLE_PAUSE_S": "0.2"}) as stack:
        async with ToolClient.connect(stack.redis_url) as client:
            container = await stack.container_of(await client.open_session())
            await wait_until_async(lambda: watch(engine, container).is_frozen(), SOON_S, "it is frozen")

            os.kill(stack.pid("sandboxd"), signal.SIGKILL)
            await wait_until_async(lambda: "sandboxd ended" in stack.errors(), SOON_S, "the keeper has seen it")
            assert await asyncio.to_thread(stack.end) == 0
        stack.footprint.assert_nothing_left(within_s=2)


async def test_a_killed_worker_restarts_and_its_call_is_reported_as_lost(own_stack: Stack) -> None:
    killed = own_stack.pid("worker")
    pool = children_of(killed)
    async with ToolClient.connect(own_stack.redis_url) as client:
        session = await client.open_session()
        container = await own_stack.container_of(session)
        call = await start_call(own_stack, session, "sleep 66")

        os.kill(killed, signal.SIGKILL)

        await wait_until_async(
            lambda: len(commands_in(container)) <= 1, SOON_S, "the command of the killed worker is killed"
        )
        result = (await all_of([call], 60))[0]
        assert (result.success, result.error_code) == (False, ErrorCode.OUTCOME_UNKNOWN), result
        assert await retried(session, "echo on") == "on\n"
    assert not [pid for pid in pool if is_alive(pid)]
    assert own_stack.pid("worker") != killed
    assert "worker ended unexpectedly (SIGKILL) and is started again" in own_stack.errors()
    assert own_stack.end() == 0
    own_stack.footprint.assert_nothing_left()


async def test_a_stack_recovers_when_all_processes_but_the_supervisor_are_killed(own_stack: Stack) -> None:
    roles = ("redis", "sandboxd", "worker", "web")
    killed = {role: own_stack.pid(role) for role in roles}
    with own_stack.open_redis() as store:
        store.config_set("appendfsync", "always")  # a killed Redis may otherwise lose data younger than a second
    async with ToolClient.connect(own_stack.redis_url) as client:
        session = await client.open_session()
        assert (await session.call("bash_tool", {"command": "true"})).success

        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)

        for role in roles:
            await asyncio.to_thread(own_stack.wait_for_another, role, killed[role])
        assert await retried(await opened_again(client), "echo on") == "on\n"
    assert own_stack.end() == 0
    own_stack.footprint.assert_nothing_left()


async def test_a_repeatedly_crashing_redis_ends_the_call_and_the_stack_with_its_last_log_lines(
    own_stack: Stack,
) -> None:
    """The error comes long before the limit of a call's wait for a slot."""
    async with ToolClient.connect(own_stack.redis_url) as client:
        call = await start_call(own_stack, await client.open_session(), "sleep 66")

        killed = 0
        for _ in range(MAX_ENDS):
            killed = await asyncio.to_thread(own_stack.wait_for_another, "redis", killed)
            os.kill(killed, signal.SIGKILL)

        result = (await all_of([call], 50))[0]
        assert result.success is False
        assert result.error_code in OPERATOR_CODES
    assert await asyncio.to_thread(own_stack.process.wait, 60) == 1
    assert f"redis has ended {MAX_ENDS} times" in own_stack.errors()
    own_stack.footprint.assert_nothing_left()


async def retried(session: Session, command: str) -> str:
    """Return the output of the command, as soon as its host serves again. The command may run twice."""

    async def ran() -> ToolResult:
        return await session.call("bash_tool", {"command": command})

    def is_served(result: ToolResult) -> bool:
        assert result.success or result.error_code in OPERATOR_CODES, result
        return result.success

    result = await wait_until_async(ran, SOON_S, "the host serves again", accepts=is_served)
    return str(result.metadata["stdout"])


async def opened_again(client: ToolClient) -> Session:
    """Return a new session, as soon as a host accepts sessions."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OperatorError):
                return await client.open_session()
            await asyncio.sleep(0.2)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with open_redis_server() as server:
        yield server


async def test_every_call_in_flight_during_a_redis_outage_gets_one_result(
    engine: APIClient, redis_server: RedisServer
) -> None:
    """Redis is killed for five seconds. Calls end during and after the outage, and one call is sent during the
    outage.
    """
    with open_stack(engine, {"TOOLCREW_REDIS_URL": redis_server.url}) as stack:
        with stack.open_redis() as store:
            store.config_set("appendfsync", "always")  # a killed Redis may otherwise lose data younger than a second
        async with ToolClient.connect(redis_server.url) as client:
            sessions = [await client.open_session() for _ in range(2)]
            calls = [
                asyncio.create_task(_call(session, f"echo ran >> log{number}; sleep {seconds}; echo done {number}"))
                for number, seconds in enumerate((3, 9))
                for session in sessions
            ]
            with stack.open_redis() as store:
                # A worker has taken all four. The second call of a session waits there until its shell is free.
                await wait_until_async(lambda: _count_running(store) == len(calls), SOON_S, "workers have the calls")

            await asyncio.to_thread(redis_server.kill)
            down_at = time.monotonic()
            sent_into_the_outage = asyncio.create_task(_call(sessions[0], "echo sent >> outage"))
            await asyncio.sleep(5)
            await asyncio.to_thread(redis_server.start)

            results = await all_of(calls, SOON_S)
            outage_result = (await all_of([sent_into_the_outage], SOON_S))[0]

            assert [result.error for result in results] == [None] * 4
            assert [result.metadata["stdout"] for result in results] == ["done 0\n"] * 2 + ["done 1\n"] * 2
            assert time.monotonic() - down_at < SOON_S
            assert outage_result.success or outage_result.error_code == ErrorCode.BROKER_UNAVAILABLE
            for session in sessions:
                later = await session.call("bash_tool", {"command": "cat log0 log1; cat outage 2>/dev/null; true"})
                sent = "sent\n" if outage_result.success and session is sessions[0] else ""
                assert later.metadata["stdout"] == "ran\nran\n" + sent
            fresh = await client.open_session()
            assert (await fresh.call("bash_tool", {"command": "echo new"})).success
            for session in (*sessions, fresh):
                await session.close()
        assert stack.process.poll() is None
        assert stack.end() == 0
        stack.footprint.assert_nothing_left()


def _count_running(store: "redis.Redis") -> int:
    keys = [key for key in store.scan_iter("*:call.*", count=1000) if store.type(key) == b"hash"]
    return sum(store.hget(key, "state") == b"running" for key in keys)


async def _call(session: Session, command: str) -> ToolResult:
    return await session.call("bash_tool", {"command": command})


async def test_a_worker_that_redis_refuses_runs_no_call_and_reports_redis_as_the_cause(
    engine: APIClient, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker cannot mark the call as started, so it must not run the call. The operator has to fix the failure."""
    monkeypatch.setattr(delivery, "RESEND_S", 3.0)
    with redis.Redis.from_url(redis_server.url) as store:
        store.execute_command("ACL", "SETUSER", "stack", "on", ">its-password", "~*", "&*", "+@all")
        workers_url = redis_server.url.replace("redis://:a-test-password", "redis://stack:its-password")
        with open_stack(engine, {"TOOLCREW_REDIS_URL": workers_url, "TOOLCREW_SECRET": "shared"}) as stack:
            settings = OrchestratorSettings.model_validate(
                {"redis_url": redis_server.url, "secret": "shared", "queue_wait_s": 4}
            )
            async with ToolClient.connect(settings=settings) as client, await client.open_session() as session:
                # The commands with which the worker marks calls. All other commands of a call stay allowed.
                store.execute_command("ACL", "SETUSER", "stack", "-hset")
                try:
                    result = (await all_of([_call(session, "touch ran")], 60))[0]
                finally:
                    store.execute_command("ACL", "SETUSER", "stack", "+hset")
                later = await session.call("bash_tool", {"command": "ls"})
            assert stack.process.poll() is None

    assert (result.success, later.metadata["stdout"]) == (False, "")
    assert result.error_code == ErrorCode.BROKER_UNAVAILABLE, result.error
