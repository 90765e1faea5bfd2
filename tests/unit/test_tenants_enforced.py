"""Enforcement of a tenant's policy: the dispatcher does not send a forbidden call, and a worker does not run a
forbidden call that arrives.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import ConfigError, ErrorCode, RefusalReason, ToolFailure
from contract.names import refusals_key, tenants_key
from contract.registry import ToolRegistry
from contract.tenancy import CommandRule, SandboxTerms, TenantPolicy, seal_policy
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from store.connection import SharedClock
from store.metrics import RefusalCounter
from store.tenants import WorkerTenants
from tests.builders import KEY, build_call, build_context, build_spec
from tests.conftest import RedisProcess
from tests.fakes import AnsweringTransport, FakeSandboxClient, MemoryBlobs, MemoryLedger, StaticCatalog, build_executor
from workers.executor import CallPolicy
from workers.tools.base import Outcome, WorkerTool

pytestmark = pytest.mark.usefixtures("quiet_logs")

BASH = build_spec(
    "bash_tool", properties={"command": {"type": "string"}}, command_parameter="command", aliases={"cmd": "command"}
)
CLOSE = build_spec("session.close", audience="session")
NO_PUSH = TenantPolicy(commands=(CommandRule(action="deny", argv_prefix=("git", "push")),))


class FixedTenants:
    """Policies of a dict, for both sides. Any other name is an unknown tenant."""

    def __init__(self, policies: Mapping[str, TenantPolicy | Exception]) -> None:
        self._policies = policies

    def find(self, tenant: str) -> TenantPolicy:
        policy = self._policies.get(tenant, ToolFailure(ErrorCode.UNKNOWN_TENANT, f"there is no tenant {tenant}"))
        if isinstance(policy, Exception):
            raise policy
        return policy


class OrchestratorTenants(FixedTenants):
    async def policy(self, tenant: str) -> TenantPolicy:
        return self.find(tenant)

    async def check_budgets(self, tenant: str) -> None:
        """No tenant has budgets."""


class FixedWorkerTenants(FixedTenants, WorkerTenants):
    def policy(self, tenant: str) -> TenantPolicy:
        return self.find(tenant)


class Harness:
    """A worker with bash_tool and session.close, for tenants with these policies."""

    def __init__(self, **policies: TenantPolicy | Exception) -> None:
        self.counted: list[RefusalReason] = []
        self.terms: list[SandboxTerms | None] = []
        self.ledger = MemoryLedger()
        registry = ToolRegistry([WorkerTool(spec, self.handle) for spec in (BASH, CLOSE)])
        policy = CallPolicy(registry, None, FixedWorkerTenants(policies), self.counted.append)
        parts = (FakeSandboxClient(), self.ledger, MemoryBlobs(), {}, "host.h1.b/w", SharedClock())
        self.executor = build_executor(registry, *parts, policy=policy)

    def handle(self, _: dict[str, Any], bench: Any) -> Outcome:
        self.terms.append(bench._terms)
        return Outcome("ran")

    def run(self, name: str = "bash_tool", tenant: str = "acme", **arguments: Any) -> ErrorCode | None:
        return self.executor.execute(build_call(name, **arguments), build_context(tenant=tenant)).error_code


def test_a_worker_runs_what_the_policy_allows_with_the_terms_of_its_sandboxes() -> None:
    terms = SandboxTerms(network="none")
    harness = Harness(acme=TenantPolicy(sandbox=terms))
    assert harness.run(command="ls") is None
    assert (harness.terms, harness.counted) == ([terms], [])


@pytest.mark.parametrize(
    ("policy", "arguments", "code"),
    [
        (TenantPolicy(tools=("read_tool",)), {"command": "ls"}, ErrorCode.PERMISSION_DENIED),
        (NO_PUSH, {"command": "ls; git push"}, ErrorCode.SECURITY_REFUSED),
        (NO_PUSH, {"cmd": "git push"}, ErrorCode.SECURITY_REFUSED),
        (ConfigError("the policy cannot be read"), {"command": "ls"}, ErrorCode.CONFIG_MISSING),
    ],
)
def test_a_worker_refuses_before_it_claims_the_call(
    policy: TenantPolicy | Exception, arguments: dict[str, str], code: ErrorCode
) -> None:
    harness = Harness(acme=policy)
    assert harness.run(**arguments) is code
    assert (harness.terms, harness.ledger.claimed, harness.counted) == ([], set(), [])


def test_a_call_for_a_tenant_that_is_none_is_refused_and_counted() -> None:
    harness = Harness(acme=TenantPolicy())
    assert harness.run(tenant="mallory", command="ls") is ErrorCode.UNKNOWN_TENANT
    assert (harness.terms, harness.counted) == ([], ["wrong_tenant"])


def test_a_session_of_a_removed_tenant_can_be_closed() -> None:
    harness = Harness(
        broken=ConfigError("the policy cannot be read"),
        bare=TenantPolicy(tools=(), commands=(CommandRule(action="deny"),)),
    )
    assert [harness.run("session.close", tenant=tenant) for tenant in ("gone", "broken", "bare")] == [None] * 3
    assert harness.counted == []


def test_a_worker_that_cannot_ask_runs_nothing() -> None:
    registry = ToolRegistry([WorkerTool(BASH, lambda *_: Outcome("ran"))])
    policy = CallPolicy(registry, None, WorkerTenants(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)), "test", KEY))
    parts = (FakeSandboxClient(), MemoryLedger(), MemoryBlobs(), {}, "host.h1.b/w", SharedClock())
    executor = build_executor(registry, *parts, policy=policy)
    assert (
        executor.execute(build_call("bash_tool", command="ls"), build_context()).error_code
        is ErrorCode.BROKER_UNAVAILABLE
    )


def test_refusals_are_counted_in_redis(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        client.hset(tenants_key("test"), "acme", seal_policy(KEY, "acme", TenantPolicy()))
        policy = CallPolicy(
            ToolRegistry(), None, WorkerTenants(client, "test", KEY), RefusalCounter(client, "test").count
        )
        for _ in range(2):
            with pytest.raises(ToolFailure):
                policy.admit("mallory", BASH, {"command": "ls"})
        assert policy.admit("acme", BASH, {"command": "ls"}) == SandboxTerms()
        assert client.hgetall(refusals_key("test")) == {b"wrong_tenant": b"2"}


def fine(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="ran")


async def dispatch(
    policy: TenantPolicy | None, name: str = "bash_tool", **arguments: Any
) -> tuple[ErrorCode | None, int]:
    """Return the code of a call for acme, and the number of messages sent for the call."""
    transport, tenants = AnsweringTransport(fine), OrchestratorTenants({"acme": policy} if policy is not None else {})
    dispatcher = Dispatcher(
        transport, TenantCatalog(StaticCatalog(BASH, CLOSE)), KEY, queue_wait_s=60, rules=CallRules(tenants)
    )
    audience: Any = "session" if name.startswith("session.") else "model"
    result = await dispatcher.dispatch(Request(build_call(name, **arguments), "acme", "s1", "q", audience=audience))
    return result.error_code, len(transport.deliveries)


@pytest.mark.parametrize(
    ("policy", "arguments", "code"),
    [
        (TenantPolicy(), {"command": "git push"}, None),
        (TenantPolicy(tools=("read_tool",)), {"command": "ls"}, ErrorCode.PERMISSION_DENIED),
        (NO_PUSH, {"command": "ls && git push"}, ErrorCode.SECURITY_REFUSED),
        (NO_PUSH, {"cmd": "git push"}, ErrorCode.SECURITY_REFUSED),
        (None, {"command": "ls"}, ErrorCode.UNKNOWN_TENANT),
    ],
)
async def test_the_dispatcher_sends_nothing_that_the_policy_forbids(
    policy: TenantPolicy | None, arguments: dict[str, str], code: ErrorCode | None
) -> None:
    assert await dispatch(policy, **arguments) == (code, 1 if code is None else 0)


async def test_the_dispatcher_sends_the_closing_of_a_session_whose_tenant_is_gone() -> None:
    assert await dispatch(None, "session.close") == (None, 1)
