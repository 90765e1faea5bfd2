"""Switch tools off on a real pool. The switch takes effect everywhere within two seconds, without a restart, and
affects nothing else.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from contract.calls import ToolCall
from contract.errors import ErrorCode
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.sessions import Session
from orchestrator.sdk.client import ToolClient
from tests.raw_queue import open_dispatcher
from tests.stack import Stack

pytestmark = pytest.mark.stack

SOON_S = 2.0


@contextlib.asynccontextmanager
async def disabled_tool(client: ToolClient, name: str) -> AsyncIterator[None]:
    await client.disable(name, reason="it is being repaired")
    try:
        yield
    finally:
        await client.enable(name)


async def seconds_until(session: Session, dispatcher: Dispatcher | None, code: ErrorCode | None) -> float:
    """Return the seconds until a call of bash_tool ends with this code. `dispatcher`: bypasses all checks of the session."""
    info, started = await session.info(), time.monotonic()
    while True:
        if dispatcher is None:
            result = await session.call("bash_tool", {"command": "true"})
        else:
            call = ToolCall(id=f"switch-{time.monotonic_ns()}", name="bash_tool", arguments={"command": "true"})
            result = await dispatcher.dispatch(Request(call, session.tenant, session.id, info.queue))
        took = time.monotonic() - started
        if result.error_code == code or took > 2 * SOON_S:
            return took


async def seconds_until_withdrawn(client: ToolClient) -> float:
    """Return the seconds until bash_tool is no longer offered to a model."""
    started = time.monotonic()
    while "bash_tool" in [spec.name for spec in await client.tools()] and time.monotonic() - started < 2 * SOON_S:  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # the state of another client gives no event here
    return time.monotonic() - started


async def test_a_tool_switch_takes_effect_in_every_worker_and_client_within_two_seconds(
    stack: Stack, client: ToolClient, session: Session
) -> None:
    async with ToolClient.connect(stack.redis_url) as administrator, open_dispatcher(stack.broker) as dispatcher:
        # All processes know that the tool is on, as late as possible.
        assert await seconds_until(session, None, None) < SOON_S
        assert await seconds_until(session, dispatcher, None) < SOON_S
        async with disabled_tool(administrator, "bash_tool"):
            assert await seconds_until(session, dispatcher, ErrorCode.TOOL_DISABLED) < SOON_S
            assert await seconds_until(session, None, ErrorCode.TOOL_DISABLED) < SOON_S
            # The worker may have learned of the switch before this client.
            assert await seconds_until_withdrawn(client) < SOON_S
            assert (await session.call("write_tool", {"file_path": "a.txt", "content": "a"})).success
            assert (await session.exec(["true"])).returncode == 0
        assert await seconds_until(session, dispatcher, None) < SOON_S
        assert await seconds_until(session, None, None) < SOON_S
