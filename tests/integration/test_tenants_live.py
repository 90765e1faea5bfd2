"""Tenants on a real pool. A policy and a key take effect everywhere within two seconds, without a restart, on both
sides of the queue.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode, ToolFailure
from contract.tenancy import CommandRule, TenantPolicy
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.sessions import Session
from store.api_keys import ApiKeys
from store.connection import open_redis
from store.tenants import RedisTenants
from tests.raw_queue import open_dispatcher
from tests.stack import Stack

pytestmark = pytest.mark.stack

SOON_S = 2.0
WRITES_ONLY = TenantPolicy(tools=("write_*",))
NO_PUSH = TenantPolicy(commands=(CommandRule(action="deny", tool="bash_tool", argv_prefix=("git", "push")),))
Call = Callable[[], Awaitable[ToolResult]]


class TenantAdmin:
    """Tenants and keys of the stack, with the operations of an administrator."""

    def __init__(self, tenants: RedisTenants, keys: ApiKeys) -> None:
        self.tenants = tenants
        self.keys = keys

    @contextlib.asynccontextmanager
    async def set_default_policy(self, policy: TenantPolicy) -> AsyncIterator[None]:
        await self.tenants.replace("default", policy)
        try:
            yield
        finally:
            await self.tenants.replace("default", TenantPolicy())


@pytest.fixture
async def tenant_admin(stack: Stack) -> AsyncIterator[TenantAdmin]:
    client = open_redis(stack.broker)
    yield TenantAdmin(
        RedisTenants(client, stack.broker.deployment, stack.broker.signing_keys()),
        ApiKeys(client, stack.broker.deployment, stack.broker.signing_keys()),
    )
    await client.aclose()


async def seconds_until(call: Call, code: ErrorCode | None) -> float:
    """Return the seconds until the call ends with this code."""
    started = time.monotonic()
    while (await call()).error_code != code and time.monotonic() - started < 2 * SOON_S:
        pass
    return time.monotonic() - started


async def seconds_until_refused(session: Session, message: str, *argv: str) -> float:
    """Return the seconds until the program is no longer allowed."""
    started = time.monotonic()
    while time.monotonic() - started < 2 * SOON_S:
        try:
            await session.exec(argv)
        except ToolFailure as failure:
            if message not in failure.message:
                raise
            break
    return time.monotonic() - started


async def call_without_checks(dispatcher: Dispatcher, session: Session, command: str) -> ToolResult:
    """Return the result of a command from a worker alone. The dispatcher knows no tenants."""
    call = ToolCall(id=f"tenant-{time.monotonic_ns()}", name="bash_tool", arguments={"command": command})
    return await dispatcher.dispatch(Request(call, session.tenant, session.id, (await session.info()).queue))


async def test_a_policy_takes_effect_on_both_sides_of_the_queue_within_two_seconds(
    stack: Stack, session: Session, tenant_admin: TenantAdmin
) -> None:
    async with open_dispatcher(stack.broker) as dispatcher:

        async def sent() -> ToolResult:
            return await session.call("bash_tool", {"command": "git push --help || true"})

        async def smuggled() -> ToolResult:
            return await call_without_checks(dispatcher, session, "git push --help || true")

        for call in (smuggled, sent):
            assert await seconds_until(call, None) < SOON_S
        async with tenant_admin.set_default_policy(NO_PUSH):
            for call in (smuggled, sent):
                assert await seconds_until(call, ErrorCode.SECURITY_REFUSED) < SOON_S
            assert (await session.exec(["true"])).returncode == 0
            # Another worker process may execute the call, and that process learns of the policy at another time.
            assert (
                await seconds_until_refused(session, "commands with 'git push' are forbidden", "git", "push") < SOON_S
            )
            await tenant_admin.tenants.replace("default", WRITES_ONLY)
            for call in (smuggled, sent):
                assert await seconds_until(call, ErrorCode.PERMISSION_DENIED) < SOON_S
            assert (await session.call("write_tool", {"file_path": "a.txt", "content": "a"})).success
            assert await seconds_until_refused(session, "not allowed for tenant default", "true") < SOON_S
        for call in (smuggled, sent):
            assert await seconds_until(call, None) < SOON_S
