"""Tenants on a real pool. A policy and a key take effect everywhere within two seconds, without a restart, on both
sides of the queue.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.redis.raw_queue import open_dispatcher
from tests.support.stack.stack import Stack
from tests.support.stack.waiting import assert_in_force
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.tenancy import CommandRule, TenantPolicy
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants

pytestmark = pytest.mark.stack

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


async def assert_code(call: Call, code: ErrorCode | None) -> None:
    """Check that the call ends with this code as soon as the change is in force."""

    async def has_code() -> bool:
        return (await call()).error_code == code

    await assert_in_force(has_code)


async def assert_refused(session: Session, message: str, *argv: str) -> None:
    """Check that the program is refused with this message as soon as the change is in force."""

    async def is_refused() -> bool:
        try:
            await session.exec(argv)
        except ToolFailure as failure:
            if message not in failure.message:
                raise
            return True
        return False

    await assert_in_force(is_refused)


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
            await assert_code(call, None)
        async with tenant_admin.set_default_policy(NO_PUSH):
            for call in (smuggled, sent):
                await assert_code(call, ErrorCode.SECURITY_REFUSED)
            assert (await session.exec(["true"])).returncode == 0
            # Another worker process may execute the call, and that process learns of the policy at another time.
            await assert_refused(session, "commands with 'git push' are forbidden", "git", "push")
            await tenant_admin.tenants.replace("default", WRITES_ONLY)
            for call in (smuggled, sent):
                await assert_code(call, ErrorCode.PERMISSION_DENIED)
            assert (await session.call("write_tool", {"file_path": "a.txt", "content": "a"})).success
            await assert_refused(session, "not allowed for tenant default", "true")
        for call in (smuggled, sent):
            await assert_code(call, None)
