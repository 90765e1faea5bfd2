"""Switch tools off on a real pool. The switch takes effect everywhere within two seconds, without a restart, and
affects nothing else.
"""

import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.redis.raw_queue import open_dispatcher
from tests.support.stack.stack import Stack
from tests.support.stack.waiting import assert_in_force
from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack


@contextlib.asynccontextmanager
async def disabled_tool(client: ToolClient, name: str) -> AsyncIterator[None]:
    await client.disable(name, reason="it is being repaired")
    try:
        yield
    finally:
        await client.enable(name)


async def test_a_tool_switch_takes_effect_in_every_worker_and_client_within_two_seconds(
    stack: Stack, client: ToolClient, session: Session
) -> None:
    info = await session.info()

    async def call(code: ErrorCode | None) -> bool:
        return (await session.call("bash_tool", {"command": "true"})).error_code == code

    async def call_worker(code: ErrorCode | None) -> bool:
        # The dispatcher bypasses all checks of the session, so only the worker refuses the call.
        call = ToolCall(id=f"switch-{time.monotonic_ns()}", name="bash_tool", arguments={"command": "true"})
        result = await dispatcher.dispatch(Request(call, session.tenant, session.id, info.queue))
        return result.error_code == code

    async def is_withdrawn() -> bool:
        return "bash_tool" not in [spec.name for spec in await client.tools()]

    async with ToolClient.connect(stack.redis_url) as administrator, open_dispatcher(stack.broker) as dispatcher:
        # All processes know that the tool is on, as late as possible.
        # A worker may still have the switch of an earlier test.
        await assert_in_force(lambda: call(None))
        await assert_in_force(lambda: call_worker(None))
        async with disabled_tool(administrator, "bash_tool"):
            await assert_in_force(lambda: call_worker(ErrorCode.TOOL_DISABLED))
            await assert_in_force(lambda: call(ErrorCode.TOOL_DISABLED))
            # The worker may have learned of the switch before this client.
            await assert_in_force(is_withdrawn)
            assert (await session.call("write_tool", {"file_path": "a.txt", "content": "a"})).success
            assert (await session.exec(["true"])).returncode == 0
        await assert_in_force(lambda: call_worker(None))
        await assert_in_force(lambda: call(None))
