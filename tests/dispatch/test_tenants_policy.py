"""A tenant's policy: its bounds, what it covers, unreadable policies, and its enforcement on both sides."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context, build_spec
from tests.support.records.fakes import (
    AnsweringTransport,
    FakeSandboxClient,
    MemoryBlobs,
    MemoryLedger,
    StaticCatalog,
    build_executor,
)
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, RefusalReason, ToolFailure
from toolcrew.contract.names import refusals_key, tenants_key
from toolcrew.contract.registry import ToolRegistry, check_call
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import (
    MAX_POLICY_BYTES,
    VERSION_FIELD,
    CommandRule,
    SandboxPolicy,
    TenantPolicy,
    parse_policy,
    parse_tenants,
    seal_policy,
)
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog, check_policy, with_tenant_rules
from toolcrew.store.clock import SharedClock
from toolcrew.store.metrics import RefusalCounter
from toolcrew.store.tenants import StoredPolicy, WorkerTenants
from toolcrew.workers.executor import CallPolicy
from toolcrew.workers.tools.base import Outcome, WorkerTool
from toolcrew.workers.tools.builtin import build_registry

BASH = build_spec(
    "bash_tool",
    properties={"command": {"type": "string"}},
    command_parameter="command",
    input_parameter="stdin",
    aliases={"cmd": "command"},
)
EXEC = next(spec for spec in build_registry().specs() if spec.name == "session.exec")
NO_PUSH = CommandRule(action="deny", tool="bash_tool", argv_prefix=("git", "push"))


def refusal(policy: TenantPolicy, spec: Any, **arguments: Any) -> ErrorCode | None:
    try:
        check_call(policy, "acme", spec, arguments)
    except ToolFailure as failure:
        return failure.code if failure.metadata["was_refused"] else None
    return None


HEAVY_DEFAULT = seal_policy(KEY, "default", TenantPolicy(weight=3)).encode()


def build_stored_policy(
    own: bytes | None = None, default: bytes | None = None, fields: int = 0, version: bytes | None = None
) -> StoredPolicy:
    return StoredPolicy(version, own, default, fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 0},
        {"weight": -1},
        {"weight": 1e-300},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": 1001},
        {"in_flight": 0},
        {"in_flight": 10**7},
        {"queued": -1},
        {"rate_per_s": 0},
        {"rate_per_s": float("nan")},
        {"burst": 0},
        {"sandboxes": -1},
        {"tools": ["a*b"]},
        {"tools": [""]},
        {"tools": ["t"] * 1001},
        {"commands": [{"action": "permit"}]},
        {"commands": [{"action": "deny", "argv_prefix": [""]}]},
        {"commands": [{"action": "deny", "argv_prefix": ["x"] * 33}]},
        {"commands": [{"action": "deny", "tenant": "acme"}]},
        {"sandbox": {"network": "host"}},
        {"sandbox": {"workspace_bytes": 1}},
        {"sandbox": {"runtime": "runc"}},
        {"priority": 1},
    ],
)
def test_invalid_policy_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TenantPolicy.model_validate(fields)


@pytest.mark.parametrize(
    "name",
    ["", "a" * 65, "a b", "a:b", "a\n", "../x", "tenant\u0000", "ähm", VERSION_FIELD, "a*", "{acme}", "a'; drop", "٣"],
)
def test_invalid_tenant_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        ToolContext(tenant=name, sent_at=0, deadline_at=1)
    assert build_context(tenant="Team-1_b").tenant == "Team-1_b"


@pytest.mark.parametrize(
    ("tools", "name", "is_allowed"),
    [
        (None, "bash_tool", True),
        ((), "bash_tool", False),
        (("read_tool",), "read_tool", True),
        (("read_tool",), "read_tool2", False),
        (("read_*",), "read_tool", True),
        (("*",), "anything", True),
        (("Read_tool",), "read_tool", False),
        ((), "session.open", True),
        ((), "session.close", True),
        ((), "session.exec", False),
        (("bash_tool",), "session.exec", True),
        (("session.exec",), "session.exec", True),
        (("session.exec",), "bash_tool", False),
        (("read_tool",), "session.write_file", False),
        (("read_tool",), "session.read_file", True),
    ],
)
def test_allowed_tool_includes_its_session_verbs(tools: tuple[str, ...] | None, name: str, is_allowed: bool) -> None:
    assert TenantPolicy(tools=tools).allows_tool(name) is is_allowed
    assert refusal(TenantPolicy(tools=tools), build_spec(name)) is (None if is_allowed else ErrorCode.PERMISSION_DENIED)


@pytest.mark.parametrize(
    "command",
    ["git push", "ls; git -C x push", "bash -c 'git push'", "$(git push)", "timeout 5 git push", "$GIT git push"],
)
def test_denied_command_is_refused_in_any_part_of_the_line(command: str) -> None:
    assert refusal(TenantPolicy(commands=(NO_PUSH,)), BASH, command=command) is ErrorCode.SECURITY_REFUSED


def test_denied_command_is_refused_as_input_of_a_shell() -> None:
    assert (
        refusal(TenantPolicy(commands=(NO_PUSH,)), BASH, command="", stdin="git push\n") is ErrorCode.SECURITY_REFUSED
    )


def test_session_exec_is_judged_like_bash_tool() -> None:
    policy = TenantPolicy(commands=(NO_PUSH,))
    assert refusal(policy, EXEC, argv=["git", "push"]) is ErrorCode.SECURITY_REFUSED
    assert refusal(policy, EXEC, argv=["bash", "-c", "ls && git push"]) is ErrorCode.SECURITY_REFUSED
    assert refusal(policy, EXEC, argv=["git", "status"]) is None


def test_other_commands_and_tools_are_allowed() -> None:
    assert refusal(TenantPolicy(commands=(NO_PUSH,)), BASH, command="git status; echo push") is None
    assert refusal(TenantPolicy(commands=(NO_PUSH,)), build_spec("other_tool"), text="git push") is None
    assert refusal(TenantPolicy(), BASH, command="git push") is None


def test_deny_rule_without_a_prefix_forbids_tools_but_not_session_open() -> None:
    policy = TenantPolicy(commands=(CommandRule(action="deny"),))
    assert refusal(policy, BASH, command="ls") is ErrorCode.PERMISSION_DENIED
    assert refusal(policy, EXEC, argv=["ls"]) is ErrorCode.PERMISSION_DENIED
    assert refusal(policy, build_spec("session.open", audience="session")) is None


def test_ask_and_allow_rules_refuse_nothing() -> None:
    rules = (CommandRule(action="ask", argv_prefix=("git",)), CommandRule(action="allow", argv_prefix=("rm",)))
    assert refusal(TenantPolicy(commands=rules), BASH, command="git push; rm -rf /srv/x") is None


@pytest.mark.parametrize("padding", [0, 100_000])
async def test_policy_check_covers_commands_of_any_length(padding: int) -> None:
    policy = TenantPolicy(commands=(NO_PUSH,))
    with pytest.raises(ToolFailure) as refused:
        await check_policy(policy, "acme", BASH, {"command": "echo " + "x" * padding + "; git push"})
    assert refused.value.code is ErrorCode.SECURITY_REFUSED
    await check_policy(policy, "acme", BASH, {"command": "echo " + "x" * padding})


def test_tenant_rules_are_combined_with_program_rules() -> None:
    own = ApprovalPolicy((Rule("ask", argv_prefix=("make",)),))
    rules = (
        NO_PUSH,
        CommandRule(action="allow", argv_prefix=("rm",)),
        CommandRule(action="allow", argv_prefix=("make",)),
    )
    joined = with_tenant_rules(own, TenantPolicy(commands=rules), "acme")
    assert [joined.decide("acme", BASH, {"command": text}).action for text in ("git push", "rm -rf *", "make")] == [
        "deny",
        "allow",
        "ask",
    ]
    assert joined.decide("other", BASH, {"command": "git push"}).action == "allow"
    assert with_tenant_rules(own, TenantPolicy(), "acme") is own


def test_with_registered_tenants_unknown_names_are_refused() -> None:
    closed = build_stored_policy(default=HEAVY_DEFAULT, fields=3, version=b"v")
    assert closed.policy("default", KEY).weight == 3
    assert (
        build_stored_policy(own=seal_policy(KEY, "acme", TenantPolicy(weight=2)).encode(), fields=1)
        .policy("acme", KEY)
        .weight
        == 2
    )
    with pytest.raises(ToolFailure, match=r"tenant anybody does not exist.*toolcrew tenants add anybody") as refused:
        closed.policy("anybody", KEY)
    assert refused.value.code is ErrorCode.UNKNOWN_TENANT


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"\xff", b'{"weight": NaN}', b'{"weight": "3"}', b'{"unknown": 1}', b"[" * 100_000,
        b'{"in_flight": 1.5}',
    ],
)  # fmt: skip
def test_unreadable_policy_refuses_calls_and_says_what_to_do(text: bytes) -> None:
    sealed = KEY.seal("policy acme", text.decode(errors="replace")).encode()
    with pytest.raises(
        ConfigError,
        match=r"policy of tenant acme cannot be read .*its calls are refused.*toolcrew tenants set acme --from FILE",
    ):
        build_stored_policy(own=sealed, fields=1).policy("acme", KEY)
    policies = parse_tenants(
        KEY,
        {b"acme": sealed, b"other": seal_policy(KEY, "other", TenantPolicy()).encode(), VERSION_FIELD.encode(): b"v"},
    )
    assert isinstance(policies["acme"], ConfigError)
    assert (policies["other"], len(policies)) == (TenantPolicy(), 2)


@pytest.mark.parametrize(
    "forged",
    [
        b'{"weight": 9}',
        seal_policy(SigningKeys.of("a guess"), "acme", TenantPolicy(weight=9)).encode(),
        seal_policy(KEY, "rival", TenantPolicy(weight=9)).encode(),
        seal_policy(KEY, "acme", TenantPolicy(weight=2)).replace("2.0", "9.0").encode(),
    ],
    ids=["unsigned", "another secret", "of another tenant", "changed"],
)
def test_unverifiable_policy_refuses_calls_and_says_what_to_do(forged: bytes) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot be verified, so its calls are refused.*tenants set acme --from FILE.*TOOLCREW_SECRET",
    ):
        build_stored_policy(own=forged, fields=1).policy("acme", KEY)


def test_oversized_policy_is_not_parsed() -> None:
    text = json.dumps({"tools": ["t" * 100] * 10_000}).encode()
    assert len(text) > MAX_POLICY_BYTES
    with pytest.raises(ConfigError, match="larger than"):
        parse_policy(KEY, "acme", text)


WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
RULES = st.builds(
    CommandRule, action=st.sampled_from(["deny", "ask", "allow"]), argv_prefix=st.lists(WORDS, max_size=4).map(tuple)
)
TERMS = st.builds(
    SandboxPolicy,
    images=st.none() | st.lists(st.sampled_from(["debian", "ghcr.io/team/*", "a/b:v1"]), max_size=3).map(tuple),
    network=st.sampled_from([None, "none", "egress"]),
)
POLICIES = st.builds(
    TenantPolicy,
    tools=st.none() | st.lists(WORDS.filter(lambda name: "*" not in name), max_size=5).map(tuple),
    weight=st.floats(0.001, 1000),
    rate_per_s=st.none() | st.floats(0.001, 1000),
    commands=st.lists(RULES, max_size=5).map(tuple),
    sandbox=TERMS,
)


@given(POLICIES)
def test_stored_policy_is_read_back(policy: TenantPolicy) -> None:
    assert parse_policy(KEY, "acme", seal_policy(KEY, "acme", policy).encode()) == policy
    assert parse_policy(KEY, "acme", KEY.seal("policy acme", policy.model_dump_json()).encode()) == policy


@given(st.binary(max_size=200))
def test_any_stored_bytes_are_a_policy_or_an_error(text: bytes) -> None:
    sealed = KEY.seal("policy acme", text.decode(errors="replace")).encode()
    policy = parse_tenants(KEY, {b"acme": sealed})["acme"]
    assert isinstance(policy, TenantPolicy) or "policy of tenant acme" in str(policy)
    assert isinstance(parse_tenants(KEY, {b"acme": text})["acme"], ConfigError)


pytestmark = pytest.mark.usefixtures("quiet_logs")

CLOSE = build_spec("session.close", audience="session")
FORBIDS_PUSH = TenantPolicy(commands=(CommandRule(action="deny", argv_prefix=("git", "push")),))


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

    async def check_storage(self, tenant: str) -> None:
        """No tenant has files."""


class FixedWorkerTenants(FixedTenants, WorkerTenants):
    def policy(self, tenant: str) -> TenantPolicy:
        return self.find(tenant)


class Harness:
    """A worker with bash_tool and session.close, for tenants with these policies."""

    def __init__(self, **policies: TenantPolicy | Exception) -> None:
        self.refusals: list[RefusalReason] = []
        self.terms: list[SandboxPolicy | None] = []
        self.ledger = MemoryLedger()
        registry = ToolRegistry([WorkerTool(spec, self.handle) for spec in (BASH, CLOSE)])
        policy = CallPolicy(registry, None, FixedWorkerTenants(policies), self.refusals.append)
        parts = (FakeSandboxClient(), self.ledger, MemoryBlobs(), {}, "host.h1.b/w", SharedClock())
        self.executor = build_executor(registry, *parts, policy=policy)

    def handle(self, _: dict[str, Any], bench: Any) -> Outcome:
        self.terms.append(bench._policy)
        return Outcome("ran")

    def run(self, name: str = "bash_tool", tenant: str = "acme", **arguments: Any) -> ErrorCode | None:
        return self.executor.execute(build_call(name, **arguments), build_context(tenant=tenant)).error_code


def test_worker_runs_an_allowed_call_with_the_sandbox_terms() -> None:
    terms = SandboxPolicy(network="none")
    harness = Harness(acme=TenantPolicy(sandbox=terms))
    assert harness.run(command="ls") is None
    assert (harness.terms, harness.refusals) == ([terms], [])


@pytest.mark.parametrize(
    ("policy", "arguments", "code"),
    [
        (TenantPolicy(tools=("read_tool",)), {"command": "ls"}, ErrorCode.PERMISSION_DENIED),
        (FORBIDS_PUSH, {"command": "ls; git push"}, ErrorCode.SECURITY_REFUSED),
        (FORBIDS_PUSH, {"cmd": "git push"}, ErrorCode.SECURITY_REFUSED),
        (ConfigError("the policy cannot be read"), {"command": "ls"}, ErrorCode.CONFIG_MISSING),
    ],
)
def test_worker_refuses_a_forbidden_call_before_its_claim(
    policy: TenantPolicy | Exception, arguments: dict[str, str], code: ErrorCode
) -> None:
    harness = Harness(acme=policy)
    assert harness.run(**arguments) is code
    assert (harness.terms, harness.ledger.claimed, harness.refusals) == ([], set(), [])


def test_call_for_an_unknown_tenant_is_refused_and_counted() -> None:
    harness = Harness(acme=TenantPolicy())
    assert harness.run(tenant="mallory", command="ls") is ErrorCode.UNKNOWN_TENANT
    assert (harness.terms, harness.refusals) == ([], ["wrong_tenant"])


def test_session_of_a_removed_tenant_can_be_closed() -> None:
    harness = Harness(
        broken=ConfigError("the policy cannot be read"),
        bare=TenantPolicy(tools=(), commands=(CommandRule(action="deny"),)),
    )
    assert [harness.run("session.close", tenant=tenant) for tenant in ("gone", "broken", "bare")] == [None] * 3
    assert harness.refusals == []


def test_worker_that_cannot_read_policies_runs_nothing() -> None:
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
        assert policy.admit("acme", BASH, {"command": "ls"}) == SandboxPolicy()
        assert client.hgetall(refusals_key("test")) == {b"wrong_tenant": b"2"}


def answer_ran(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="ran")


async def dispatch(
    policy: TenantPolicy | None, name: str = "bash_tool", **arguments: Any
) -> tuple[ErrorCode | None, int]:
    """Return the code of a call for acme, and the number of messages sent for the call."""
    transport, tenants = (
        AnsweringTransport(answer_ran),
        OrchestratorTenants({"acme": policy} if policy is not None else {}),
    )
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
        (FORBIDS_PUSH, {"command": "ls && git push"}, ErrorCode.SECURITY_REFUSED),
        (FORBIDS_PUSH, {"cmd": "git push"}, ErrorCode.SECURITY_REFUSED),
        (None, {"command": "ls"}, ErrorCode.UNKNOWN_TENANT),
    ],
)
async def test_dispatcher_sends_no_forbidden_call(
    policy: TenantPolicy | None, arguments: dict[str, str], code: ErrorCode | None
) -> None:
    assert await dispatch(policy, **arguments) == (code, 1 if code is None else 0)


async def test_dispatcher_sends_the_close_for_a_removed_tenant() -> None:
    assert await dispatch(None, "session.close") == (None, 1)
