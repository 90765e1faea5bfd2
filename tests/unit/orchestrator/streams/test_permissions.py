"""Which streams the policy of a tenant allows."""

from dataclasses import dataclass

import pytest

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.stream_tickets import PROCESS, READ_FILES, WRITE_FILES
from toolcrew.contract.tenancy import CommandRule, TenantPolicy
from toolcrew.orchestrator.streams.permissions import check_stream

PORT = "port:8000"
ALL = (PROCESS, READ_FILES, WRITE_FILES, PORT)
ASK = CommandRule(action="ask", tool="bash_tool", argv_prefix=("git", "push"))
DENY_RM = CommandRule(action="deny", tool="*", argv_prefix=("rm",))
DENY_BASH, DENY_WRITE = (CommandRule(action="deny", tool=f"{name}_tool") for name in ("bash", "write"))


@dataclass
class Tenants:
    """A source with one policy."""

    present: TenantPolicy
    is_over_budget: bool = False

    async def policy(self, tenant: str) -> TenantPolicy:
        return self.present

    async def check_budgets(self, tenant: str) -> None:
        if self.is_over_budget:
            raise ToolFailure(ErrorCode.BUDGET_EXCEEDED, "used up")

    async def check_storage(self, tenant: str) -> None:
        raise AssertionError


async def find_allowed(policy: TenantPolicy) -> set[str]:
    allowed = set[str]()
    for permission in ALL:
        try:
            await check_stream(Tenants(policy), "t", permission)
        except ToolFailure as failure:
            if failure.code is not ErrorCode.PERMISSION_DENIED:
                raise
        else:
            allowed.add(permission)
    return allowed


CASES: dict[str, tuple[TenantPolicy, set[str]]] = {
    "default": (TenantPolicy(), {*ALL}),
    "no streams": (TenantPolicy(streams="refuse"), set()),
    "a rule that asks": (TenantPolicy(commands=(ASK,)), {READ_FILES, WRITE_FILES, PORT}),
    "a rule that denies a command of all tools": (TenantPolicy(commands=(DENY_RM,)), {READ_FILES, WRITE_FILES, PORT}),
    "a rule for a command of the verb": (
        TenantPolicy(commands=(CommandRule(action="deny", tool="session.exec", argv_prefix=("rm",)),)),
        {READ_FILES, WRITE_FILES, PORT},
    ),
    "a rule that asks about all verbs": (
        TenantPolicy(commands=(CommandRule(action="ask", tool="session.*"),)),
        {READ_FILES, WRITE_FILES, PORT},
    ),
    "a rule that allows": (TenantPolicy(commands=(CommandRule(action="allow"),)), {*ALL}),
    "rules and streams": (TenantPolicy(commands=(ASK,), streams="allow"), {*ALL}),
    "no bash": (TenantPolicy(commands=(DENY_BASH,), streams="allow"), {READ_FILES, WRITE_FILES, PORT}),
    "no writing": (TenantPolicy(commands=(DENY_WRITE,)), {PROCESS, READ_FILES, PORT}),
    "only reading": (TenantPolicy(tools=("read_tool",)), {READ_FILES, PORT}),
    "only bash": (TenantPolicy(tools=("bash_tool",)), {PROCESS, PORT}),
}


@pytest.mark.parametrize(("policy", "allowed"), CASES.values(), ids=CASES.keys())
async def test_the_policy_decides_about_each_permission(policy: TenantPolicy, allowed: set[str]) -> None:
    assert await find_allowed(policy) == allowed


@pytest.mark.parametrize("permission", ALL)
async def test_a_paused_tenant_and_a_used_budget_refuse_every_stream(permission: str) -> None:
    for tenants, code in (
        (Tenants(TenantPolicy(is_paused=True)), ErrorCode.RATE_LIMITED),
        (Tenants(TenantPolicy(), is_over_budget=True), ErrorCode.BUDGET_EXCEEDED),
    ):
        with pytest.raises(ToolFailure) as refused:
            await check_stream(tenants, "t", permission)
        assert refused.value.code is code
