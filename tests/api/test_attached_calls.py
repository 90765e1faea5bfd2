"""Calls, programs and sessions with an id or a key, asked for again: they run once, and every caller gets the result,
no matter which caller, client or API process dies.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis

from tests.support.stack.api_stack import ApiStack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew import AsyncClient, ErrorCode, ToolClient, ToolFailure
from toolcrew.contract.names import call_key, result_key
from toolcrew.orchestrator.sdk.http.async_client import AsyncSession

pytestmark = pytest.mark.stack

ROUNDS = 20
SLOW = "echo run >>runs; until [ -e go ]; do sleep 0.05; done; echo done"
"""A command that counts its runs, and ends after the file `go` was written."""

OVER_HTTP = """
import sys, toolcrew
url, key, session, call, command = sys.argv[1:]
with toolcrew.Client(url, key) as client:
    client.sessions.get(session).call("bash_tool", {"command": command}, call_id=call)
"""
DIRECT = """
import asyncio, sys, toolcrew
_, key, session, call, command = sys.argv[1:]
async def main():
    async with toolcrew.ToolClient.connect(api_key=key) as client:
        await (await client.session(session)).call("bash_tool", {"command": command}, call_id=call)
asyncio.run(main())
"""


@pytest.fixture
async def client(api_stack: ApiStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(api_stack.apis[0].url, api_stack.keys["acme"]) as opened:
        yield opened


@pytest.fixture
def store(api_stack: ApiStack) -> Iterator["redis.Redis"]:
    with contextlib.closing(redis.Redis.from_url(api_stack.stack.redis_url)) as opened:
        yield opened


@asynccontextmanager
async def other_replica(api_stack: ApiStack, session: AsyncSession) -> AsyncIterator[AsyncSession]:
    async with AsyncClient(api_stack.apis[1].url, api_stack.keys["acme"]) as other:
        yield other.sessions.get(session.id)


async def await_run(session: AsyncSession) -> None:
    """Wait until the command SLOW runs."""
    waiting = await session.exec(["sh", "-c", "until [ -e runs ]; do sleep 0.05; done"], timeout_s=SOON_S)
    assert waiting.returncode == 0


@pytest.mark.parametrize("program", [OVER_HTTP, DIRECT], ids=["over HTTP", "direct"])
async def test_a_call_whose_callers_are_killed_runs_once_and_the_next_caller_gets_its_result(
    api_stack: ApiStack, client: AsyncClient, program: str
) -> None:
    environment = api_stack.stack.footprint.environment({"TOOLCREW_REDIS_URL": api_stack.stack.redis_url})
    async with await client.sessions.open() as session, other_replica(api_stack, session) as again:
        for number in range(ROUNDS):
            call = f"{session.id}-{number}"
            argv = [sys.executable, "-c", program, client.url, api_stack.keys["acme"], session.id, call, SLOW]
            first = await asyncio.create_subprocess_exec(*argv, env=environment)
            try:
                await await_run(session)
            finally:
                first.kill()
                await first.wait()
            second = asyncio.create_task(again.call("bash_tool", {"command": SLOW}, call_id=call))
            await session.files.write("go", b"")
            async with asyncio.timeout(SOON_S):
                result = await second
            assert (result.output, await session.files.read("runs")) == ("done\n", b"run\n"), number
            await session.exec(["rm", "runs", "go"])


async def test_a_call_of_a_killed_api_process_goes_on(api_stack: ApiStack, client: AsyncClient) -> None:
    async with await client.sessions.open() as session:
        with api_stack.open_api() as dying:
            async with AsyncClient(dying.url, api_stack.keys["acme"]) as lost:
                calling = asyncio.create_task(
                    lost.sessions.get(session.id).call("bash_tool", {"command": SLOW}, call_id="api-killed")
                )
                await await_run(session)
                dying.kill()
                calling.cancel()
                await asyncio.gather(calling, return_exceptions=True)
        second = asyncio.create_task(session.call("bash_tool", {"command": SLOW}, call_id="api-killed"))
        await session.files.write("go", b"")
        async with asyncio.timeout(SOON_S):
            assert (await second).output == "done\n"
        assert await session.files.read("runs") == b"run\n"


async def test_a_call_id_joins_the_running_call_and_then_returns_its_stored_result(
    api_stack: ApiStack, client: AsyncClient, store: "redis.Redis"
) -> None:
    async with await client.sessions.open() as session, other_replica(api_stack, session) as again:
        first = asyncio.create_task(session.call("bash_tool", {"command": SLOW}, call_id="joined"))
        await await_run(session)
        others = [
            asyncio.create_task(caller.call("bash_tool", {"command": SLOW}, call_id="joined"))
            for caller in (session, again, again)
        ]
        refused = [await caller.call("bash_tool", {"command": "ls"}, call_id="joined") for caller in (session, again)]
        assert [one.error_code for one in refused] == [ErrorCode.INVALID_ARGUMENTS] * 2
        await session.files.write("go", b"")
        async with asyncio.timeout(SOON_S):
            outputs = [(await one).output for one in (first, *others)]
        assert outputs == ["done\n"] * 4
        async with ToolClient.connect(api_stack.stack.redis_url, api_key=api_stack.keys["acme"]) as direct:
            attached = await direct.session(session.id)
            assert (await attached.call("bash_tool", {"command": SLOW}, call_id="joined")).output == "done\n"
        assert await session.files.read("runs") == b"run\n"
        task = store.hget(call_key("default", "acme", "joined"), "task")
        assert isinstance(task, bytes)
        assert 3000 < store.ttl(result_key(task.decode())) <= 3600
        store.delete(result_key(task.decode()))
        expired = await again.call("bash_tool", {"command": SLOW}, call_id="joined")
        assert expired.error_code is ErrorCode.RESULT_EXPIRED
        assert await session.files.read("runs") == b"run\n"


async def test_a_program_with_a_key_runs_once(api_stack: ApiStack, client: AsyncClient) -> None:
    argv = ["sh", "-c", f"{SLOW} | tee out; head -c 2000000 /dev/zero"]
    async with await client.sessions.open() as session, other_replica(api_stack, session) as again:
        first = asyncio.create_task(session.exec(argv, stdin=b"in", key="k"))
        await await_run(session)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        others = [asyncio.create_task(caller.exec(argv, stdin=b"in", key="k")) for caller in (session, again)]
        await session.files.write("go", b"")
        async with asyncio.timeout(SOON_S):
            sizes = [len((await one).stdout) for one in others]
        assert sizes == [2000005, 2000005]
        with pytest.raises(ToolFailure) as refused:
            await session.exec(["ls"], key="k")
        assert refused.value.metadata["api_code"] in ("IDEMPOTENCY_MISMATCH", "INVALID_ARGUMENTS")
        assert await session.files.read("runs") == b"run\n"
        async with ToolClient.connect(api_stack.stack.redis_url, api_key=api_stack.keys["acme"]) as direct:
            attached = await direct.session(session.id)
            counted = ["sh", "-c", "echo once >>runs; cat runs"]
            assert [(await attached.exec(counted, key="d")).stdout for _ in range(3)] == [b"run\nonce\n"] * 3


async def test_a_key_opens_one_session(api_stack: ApiStack, client: AsyncClient) -> None:
    async with AsyncClient(api_stack.apis[1].url, api_stack.keys["acme"]) as other:
        opened = await asyncio.gather(*(one.sessions.open(key="job", ttl_s=600) for one in (client, other) * 3))
        assert len({session.id for session in opened}) == 1
        with pytest.raises(ToolFailure) as refused:
            await other.sessions.open(key="job", ttl_s=601)
        assert refused.value.metadata["api_code"] in ("IDEMPOTENCY_MISMATCH", "INVALID_ARGUMENTS")
        await opened[0].close()
        with pytest.raises(ToolFailure) as ended:
            await other.sessions.open(key="job", ttl_s=600)
        assert ended.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_a_session_key_of_a_killed_caller_is_claimed_by_the_next_one(
    api_stack: ApiStack, store: "redis.Redis"
) -> None:
    async with (
        ToolClient.connect(api_stack.stack.redis_url, api_key=api_stack.keys["acme"]) as direct,
        await direct.open_session(key="mine") as session,
    ):
        same = await direct.open_session(key="mine")
        assert same.id == session.id
        (name,) = [
            key for key in store.scan_iter("*session-key.*") if store.hget(key, "session") == session.id.encode()
        ]
        # The caller died while it opened the session, and no longer renews its claim.
        store.hset(name, mapping={"state": "opening", "opening_until": "0"})
        async with await direct.open_session(key="mine") as next_one:
            assert next_one.id != session.id
            await wait_until_async(
                lambda: not store.hexists(f"toolcrew:default:t:acme:session.{session.id}:place", "queue"),
                SOON_S,
                "the abandoned session ended",
            )
