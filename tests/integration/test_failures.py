"""Any process may be killed at any time: every call still gets one result, and nothing that was said to be over goes on."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from celery import Celery
from docker import APIClient

from contract.calls import ToolResult
from contract.errors import OPERATOR_CODES, ErrorCode
from orchestrator.client import ToolClient
from orchestrator.sessions import Session
from tests.stack import RedisServer, Stack, all_of, children_of, commands_in, eventually, is_alive, open_redis_server, open_stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]


async def container_of(stack: Stack, session: Session) -> str:
    sandbox = (await session.info()).sandbox
    assert sandbox is not None
    return stack.full_id(sandbox.id)


async def start_call(stack: Stack, session: Session, command: str, call_id: str | None = None) -> "asyncio.Task[ToolResult]":
    """A call whose command is seen to run."""
    container = await container_of(stack, session)
    task = asyncio.create_task(session.call("bash_tool", {"command": command}, call_id=call_id))
    await eventually(lambda: any(command in line for line in commands_in(container).values()), 15, f"{command} runs")
    return task


def pool_child_of(stack: Stack, call_id: str) -> int:
    """The pool process that runs a call, as Celery itself tells."""
    app = Celery("asker", broker=stack.redis_url, backend=stack.redis_url, set_as_current=False)
    try:
        # Both kinds of worker answer.
        active = app.control.inspect(timeout=10, limit=2).active() or {}
    finally:
        app.close()
    [pid] = [task["worker_pid"] for tasks in active.values() for task in tasks if task["id"].endswith(call_id)]
    return int(pid)


async def test_a_pool_process_killed_during_a_call_costs_only_that_call(stack: Stack, client: ToolClient) -> None:
    async with await client.open_session() as session:
        container = await container_of(stack, session)
        call = await start_call(stack, session, "sleep 66", "doomed-1")
        child = await asyncio.to_thread(pool_child_of, stack, "doomed-1")
        assert child in children_of(stack.pid("worker"))

        os.kill(child, signal.SIGKILL)
        started = time.monotonic()
        gone = asyncio.create_task(eventually(lambda: len(commands_in(container)) == 1, 10, "the command is killed with its worker"))
        result = (await all_of([call], 30))[0]

        assert (result.success, result.error_code) == (False, ErrorCode.OUTCOME_UNKNOWN)
        assert time.monotonic() - started < 20
        await gone
        after = await session.call("bash_tool", {"command": "echo on"})
        assert (after.success, after.sandbox.generation) == (True, 1)  # type: ignore[union-attr]
        await eventually(lambda: len(children_of(stack.pid("worker"))) >= 4, 20, "the pool is whole again")


async def test_a_killed_sandboxd_is_said_and_its_containers_vanish_by_themselves(own_stack: Stack) -> None:
    """Also of sessions that ran nothing: the end of its input ends a guest."""
    async with ToolClient.connect(own_stack.redis_url) as client:
        busy, idle = await client.open_session(), await client.open_session()
        call = await start_call(own_stack, busy, "sleep 66")
        assert len(own_stack.footprint.containers()) == 2
        assert idle.id != busy.id

        os.kill(own_stack.pid("sandboxd"), signal.SIGKILL)
        result = (await all_of([call], 30))[0]

        assert (result.success, result.error_code) == (False, ErrorCode.SANDBOX_UNAVAILABLE), result
        await eventually(lambda: not own_stack.footprint.containers(), 15, "the containers are gone")
    assert await asyncio.to_thread(own_stack.process.wait, 60) == 1
    assert "sandboxd" in own_stack.errors()
    own_stack.footprint.assert_nothing_left()


async def test_a_killed_worker_takes_its_commands_and_its_pool_down_and_the_stack_says_so(own_stack: Stack) -> None:
    pool = children_of(own_stack.pid("worker"))
    async with ToolClient.connect(own_stack.redis_url) as client:
        session = await client.open_session()
        container = await container_of(own_stack, session)
        call = await start_call(own_stack, session, "sleep 66")

        os.kill(own_stack.pid("worker"), signal.SIGKILL)

        await eventually(lambda: len(commands_in(container)) <= 1, 30, "the command of the killed worker is killed")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert await asyncio.to_thread(own_stack.process.wait, 60) == 1
    assert "worker" in own_stack.errors()
    assert not [pid for pid in pool if is_alive(pid)]
    own_stack.footprint.assert_nothing_left()


async def test_a_redis_that_never_comes_back_ends_a_call_long_before_it_would_have_waited_for_a_slot(own_stack: Stack) -> None:
    async with ToolClient.connect(own_stack.redis_url) as client:
        session = await client.open_session()
        call = await start_call(own_stack, session, "sleep 66")

        os.kill(own_stack.pid("redis"), signal.SIGKILL)

        result = (await all_of([call], 40))[0]
        assert result.success is False
        assert result.error_code in OPERATOR_CODES
    assert await asyncio.to_thread(own_stack.process.wait, 60) == 1
    assert "redis" in own_stack.errors()
    own_stack.footprint.assert_nothing_left()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with open_redis_server() as server:
        yield server


async def test_every_call_in_flight_gets_its_result_once_over_an_outage_of_redis(engine: APIClient, redis_server: RedisServer) -> None:
    """Redis is killed outright for five seconds: calls end during the outage, after it, and one is sent while there is no Redis."""
    with open_stack(engine, {"TOOLCREW_REDIS_URL": redis_server.url}) as stack:
        async with ToolClient.connect(redis_server.url) as client:
            sessions = [await client.open_session() for _ in range(2)]
            calls = [
                asyncio.create_task(_call(session, f"echo ran >> log{number}; sleep {seconds}; echo done {number}"))
                for number, seconds in enumerate((3, 9))
                for session in sessions
            ]
            for session in sessions:
                container = await container_of(stack, session)
                await eventually(
                    lambda container=container: sum("sleep" in line for line in commands_in(container).values()) >= 2, 15, "both calls run"
                )
            await asyncio.sleep(1.2)  # appendfsync everysec: what is younger than a second may go with a killed Redis

            await asyncio.to_thread(redis_server.kill)
            down_at = time.monotonic()
            sent_into_the_outage = asyncio.create_task(_call(sessions[0], "echo sent >> outage"))
            await asyncio.sleep(5)
            await asyncio.to_thread(redis_server.start)

            results = await all_of(calls, 60)
            outage_result = (await all_of([sent_into_the_outage], 60))[0]

            assert [result.error for result in results] == [None] * 4
            assert [result.metadata["stdout"] for result in results] == ["done 0\n"] * 2 + ["done 1\n"] * 2
            assert time.monotonic() - down_at < 45
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


async def _call(session: Session, command: str) -> ToolResult:
    return await session.call("bash_tool", {"command": command})


async def test_a_worker_that_redis_refuses_runs_nothing_and_blames_redis_not_a_bug(engine: APIClient, redis_server: RedisServer) -> None:
    """The worker cannot mark the call as started, so it must not run it, and it is the operator's failure."""
    with open_stack(engine, {"TOOLCREW_REDIS_URL": redis_server.url}) as stack:
        async with ToolClient.connect(redis_server.url) as client, await client.open_session() as session:
            with stack.open_redis() as store:
                # Redis refuses what the worker marks calls with, and nothing else that a call needs.
                store.execute_command("ACL", "SETUSER", "default", "-set")
                try:
                    result = (await all_of([_call(session, "touch ran")], 60))[0]
                finally:
                    store.execute_command("ACL", "SETUSER", "default", "+set")
            later = await session.call("bash_tool", {"command": "ls"})

        assert (result.success, later.metadata["stdout"]) == (False, "")
        assert result.error_code == ErrorCode.BROKER_UNAVAILABLE, result.error


async def test_a_client_that_is_killed_leaves_its_session_to_expire_only(stack: Stack, client: ToolClient) -> None:
    """What the stack does hold on to when a program is gone: the session, for its time to live, and no longer."""
    session = await client.open_session(ttl_s=2)
    container = await container_of(stack, session)
    call = await start_call(stack, session, "sleep 1")
    await call

    await eventually(lambda: not stack.has_container(container), 20, "the session's container is removed")
