"""Streams through the gateway of a real stack, and what a kill of each process does to them."""

import asyncio
import contextlib
import hashlib
import os
import signal

import pytest

from tests.support.stack.stack import Stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from tests.support.streams.gateway_harness import read_all
from tests.support.streams.stack_streams import open_stream_session
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, StreamLost, ToolFailure
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES
from toolcrew.contract.tenancy import CommandRule, TenantPolicy
from toolcrew.orchestrator.streams import Stream
from toolcrew.store.audit import Audit

pytestmark = pytest.mark.stack


async def test_a_process_gets_its_input_and_returns_its_output(stack: Stack) -> None:
    async with open_stream_session(stack) as opened:
        stream = await opened.start("cat", stdin=True)
        data = os.urandom(1_000_000)
        writing = asyncio.create_task(stream.write(data, is_last=True))
        assert await read_all(stream) == data
        await writing
        assert stream.end is not None
        assert stream.end["exit_code"] == 0


async def test_a_large_output_arrives_complete(stack: Stack) -> None:
    async with open_stream_session(stack) as opened:
        stream = await opened.open(
            {"what": "process", "argv": ["sh", "-c", "seq 1 2000000"], "pace": True}, window=BULK_WINDOW_BYTES
        )
        expected = "".join(f"{number}\n" for number in range(1, 2_000_001)).encode()
        assert hashlib.sha256(await read_all(stream)).digest() == hashlib.sha256(expected).digest()


async def test_streams_are_in_the_audit_log_without_their_content(stack: Stack) -> None:
    async with open_stream_session(stack) as opened:
        unrecorded = await opened.open({"what": "process", "argv": ["true"]}, is_recorded=False)
        assert await read_all(unrecorded) == b""
        stream = await opened.start("cat", stdin=True)
        await stream.write(b"secret content", is_last=True)
        assert await read_all(stream) == b"secret content"
        audit = Audit(opened.client._pool.redis, stack.info.deployment)

        async def read() -> list[tuple[str, dict[str, str]]]:
            page = await audit.read(tenant=opened.session.tenant, target=opened.session.id)
            return [(entry.action, entry.details) for entry in reversed(page.entries)]

        entries = await wait_until_async(read, SOON_S, "both entries are there", accepts=lambda rows: len(rows) == 2)
        assert [action for action, _ in entries] == ["stream.open", "stream.end"]
        assert entries[0][1]["argv"] == '["cat"]'
        assert (entries[1][1]["sent_bytes"], entries[1][1]["received_bytes"]) == ("14", "14")
        assert "secret" not in str(entries)


async def test_a_session_that_does_not_exist_has_no_streams(stack: Stack) -> None:
    async with open_stream_session(stack) as opened:
        target = opened.target
        with pytest.raises(ToolFailure) as refused:
            await opened.streams.call(type(target)(target.tenant, "unknown", target.actor), {"op": "processes"})
        assert refused.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_rules_for_commands_refuse_processes_but_no_files(own_stack: Stack) -> None:
    async with open_stream_session(own_stack) as admin:
        tenants = admin.client._pool.tenants
        rule = CommandRule(action="ask", tool="bash_tool", argv_prefix=("git", "push"))
        await tenants.add("ruled", TenantPolicy(commands=(rule,)))
        async with open_stream_session(own_stack, "ruled") as opened:
            with pytest.raises(ToolFailure) as refused:
                await opened.start("true")
            assert refused.value.code is ErrorCode.PERMISSION_DENIED
            assert (await opened.call("stat", path="/workspace"))["entry"]["type"] == "directory"
            await tenants.replace("ruled", TenantPolicy(commands=(rule,), streams="allow"))

            async def try_start() -> Stream | None:
                with contextlib.suppress(ToolFailure):
                    return await opened.start("sleep", "1000")
                return None

            stream = await wait_until_async(try_start, SOON_S, "the process is allowed")
            await tenants.pause("ruled", "a test")
            async with asyncio.timeout(SOON_S):
                with pytest.raises(ToolFailure) as paused:
                    await stream.read()
            assert paused.value.code is ErrorCode.RATE_LIMITED


async def test_every_byte_arrives_once_while_the_gateway_is_killed(own_stack: Stack) -> None:
    async with open_stream_session(own_stack) as opened:
        script = "for i in $(seq 1 400); do seq $((i*100)) $((i*100+99)); sleep 0.02; done"
        stream = await opened.start("bash", "-c", script, pace=True)
        reading = asyncio.create_task(opened.read_to_end(stream))
        for _ in range(4):  # the supervisor gives up after five ends in a minute
            killed = own_stack.pid("stream-gateway")
            os.kill(killed, signal.SIGKILL)
            await asyncio.to_thread(own_stack.wait_for_another, "stream-gateway", killed)
            await opened.call("processes")
        expected = "".join(f"{number}\n" for number in range(100, 40_100)).encode()
        assert await reading == expected


async def test_streams_stay_open_when_the_worker_is_killed(own_stack: Stack) -> None:
    async with open_stream_session(own_stack) as opened:
        stream = await opened.start("cat", stdin=True)
        killed = own_stack.pid("worker")
        os.kill(killed, signal.SIGKILL)
        await asyncio.to_thread(own_stack.wait_for_another, "worker", killed)
        # A call needs the new worker, which has raised the fence.
        await opened.session.exec(["true"])
        later = await opened.start("echo", "later")
        assert await read_all(later) == b"later\n"
        await stream.write(b"still here", is_last=True)
        assert await read_all(stream) == b"still here"


async def test_a_gateway_that_ends_in_order_tells_its_streams(own_stack: Stack) -> None:
    async with open_stream_session(own_stack) as opened:
        stream = await opened.start("cat", stdin=True)
        os.kill(own_stack.pid("stream-gateway"), signal.SIGTERM)
        with pytest.raises(StreamLost):
            await stream.read()
        again = await opened.open({"what": "attach", "process": stream.opened["process"], "from": "start"})
        await again.write(b"x", is_last=True)
        assert await read_all(again) == b"x"


async def test_the_end_of_sandboxd_ends_its_streams(own_stack: Stack) -> None:
    async with open_stream_session(own_stack) as opened:
        stream = await opened.start("cat", stdin=True)
        os.kill(own_stack.pid("sandboxd"), signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            with pytest.raises((SandboxUnavailable, StreamLost)):
                await stream.read()
