"""Calls of up to a day on real processes: their records outlive them, and kills and losses end them at once."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.stack.stack import Stack, commands_in, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_TIMEOUT_S, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import call_key, location_key
from toolcrew.contract.session_locations import LOCATION_MARGIN_S
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.call_records import CALL_TTL_S

pytestmark = pytest.mark.stack

MORE_S = LONGEST_TIMEOUT_S - MAX_TIMEOUT_S


@pytest.fixture(scope="module")
def stack(engine: APIClient) -> Iterator[Stack]:
    classes = {"default": {"largest": {"timeout_s": LONGEST_TIMEOUT_S}}}
    with open_stack(engine, {"TOOLCREW_TENANT_CLASSES": json.dumps(classes)}) as opened:
        yield opened


async def start(stack: Stack, session: Session, call_id: str) -> "asyncio.Task[ToolResult]":
    """Start a call that may run for a day, and wait until its command runs."""
    sandbox = (await session.info()).sandbox
    assert sandbox is not None
    container = stack.full_id(sandbox.id)
    call = asyncio.create_task(
        session.call("bash_tool", {"command": "sleep 4321"}, call_id=call_id, timeout_s=LONGEST_TIMEOUT_S)
    )
    await wait_until_async(lambda: "sleep 4321" in commands_in(container).values(), SOON_S, "the command runs")
    return call


async def test_a_call_outlives_the_ttl_of_its_session(stack: Stack) -> None:
    async with ToolClient.connect(stack.redis_url) as client:
        session = await client.open_session(ttl_s=2)
        assert (await session.info()).timeout_s == LONGEST_TIMEOUT_S
        result = await session.call("bash_tool", {"command": "sleep 7; echo done", "timeout": 7_200})
        assert (result.output, result.error) == ("done\n", None)
        ended = await session.exec(["sh", "-c", "sleep 4; echo done"], timeout_s=LONGEST_TIMEOUT_S)
        assert ended.stdout == b"done\n"


async def test_the_records_of_a_day_long_call_live_longer_and_the_call_can_be_killed(stack: Stack) -> None:
    async with ToolClient.connect(stack.redis_url) as client:
        session = await client.open_session(ttl_s=60)
        call = await start(stack, session, "of-a-day")
        await session.call("bash_tool", {"command": "true"})  # a short call does not shorten what the long one needs
        with stack.open_redis() as redis:
            assert redis.ttl(call_key("default", "default", "of-a-day")) > CALL_TTL_S + MORE_S - 60
            assert redis.ttl(location_key("default", "default", session.id)) > LOCATION_MARGIN_S + MORE_S
        listed = (await client.list_calls()).data
        assert ("of-a-day", "running") in {(row.id, row.state) for row in listed}

        await client.kill_call("of-a-day", reason="enough")
        result = await asyncio.wait_for(call, SOON_S)
        assert (result.error_code, "enough" in str(result.error)) == (ErrorCode.CANCELLED, True)
        with stack.open_redis() as redis:
            assert redis.ttl(call_key("default", "default", "of-a-day")) <= CALL_TTL_S
        assert (await session.call("bash_tool", {"command": "pgrep -c sleep"})).output == "0\n[exit code 1]"


async def test_a_day_long_call_is_lost_with_its_worker_within_seconds(stack: Stack) -> None:
    async with ToolClient.connect(stack.redis_url) as client:
        call = await start(stack, await client.open_session(), "to-be-lost")
        os.kill(stack.pid("worker"), signal.SIGKILL)
        assert (await asyncio.wait_for(call, SOON_S)).error_code is ErrorCode.OUTCOME_UNKNOWN
