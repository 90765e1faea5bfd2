"""Decides whether a call may be sent at all: switches of administrators and the tenant's policy. What a run asks about
before is decided here as well.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from contract.errors import ConfigError, ToolFailure
from contract.registry import RELEASING, Switch, check_call, check_switches, check_tools, find_switch
from contract.schema import prepare_arguments
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy, tools_of
from orchestrator.approvals.policies import ApprovalPolicy, Rule
from store.switches import SwitchSource
from store.tenants import OpenTenants, TenantSource

MAX_INLINE_CHARS = 4 * 1024
"""Longer commands are judged in a thread: hostile ones take up to a second."""


@dataclass(frozen=True)
class CallRules:
    """What tenants may call. `switches` None: no tool can be turned off."""

    tenants: TenantSource = field(default_factory=OpenTenants)
    switches: SwitchSource | None = None

    async def policy(self, tenant: str, tool: str) -> TenantPolicy:
        """Return the tenant's policy for a call of that tool. A tool that only ends things may be called by a tenant
        that is no longer registered, too.

        Raises ToolFailure(UNKNOWN_TENANT), BrokerUnavailable, ConfigError for a policy that cannot be read.
        """
        try:
            return await self.tenants.policy(tenant)
        except (ToolFailure, ConfigError):
            if tool not in RELEASING:
                raise
            return TenantPolicy()

    async def check_switch(self, spec: ToolSpec, tenant: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Raises ToolFailure(TOOL_DISABLED) for a tool that an administrator has turned off, BrokerUnavailable when
        that is not known.
        """
        if self.switches is not None and spec.audience == "model":
            switches = await self.switches.switches()
            check_switches(lambda name: find_switch(switches, name, tenant), spec, arguments)


async def check_policy(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Check prepared arguments. Raises ToolFailure: PERMISSION_DENIED, SECURITY_REFUSED (contract/registry.py)."""
    if policy.commands and spec.command_parameter is not None and len(str(arguments)) > MAX_INLINE_CHARS:
        await asyncio.to_thread(check_call, policy, tenant, spec, arguments)
    else:
        check_call(policy, tenant, spec, arguments)


def is_offered(switches: Mapping[str, Switch], policy: TenantPolicy, spec: ToolSpec) -> bool:
    """Return whether models of the tenant see the tool. `switches`: by tool, those that count for the tenant."""
    return spec.audience == "model" and all(
        used not in switches and policy.allows_tool(used) for used in tools_of(spec, {})
    )


def refuse_unasked(
    switches: Mapping[str, Switch], policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]
) -> None:
    """Refuse a call that will not be run whatever an approver says, so that no approver is asked. `arguments` as they
    were given.

    Raises ToolFailure: TOOL_DISABLED, PERMISSION_DENIED; none for invalid arguments, which the review reports.
    """

    def find(name: str) -> Switch | None:
        return find_switch(switches, name, tenant)

    check_switches(find, spec)
    try:
        prepared, _ = prepare_arguments(spec, arguments)
    except ToolFailure:
        return
    check_switches(find, spec, prepared)
    check_tools(policy, tenant, spec, prepared)


def with_tenant_rules(policy: ApprovalPolicy, tenant_policy: TenantPolicy, tenant: str) -> ApprovalPolicy:
    """Return the approval policy with the tenant's own rules added: of all that match, deny goes before ask and ask
    before allow.
    """
    if not tenant_policy.commands:
        return policy
    rules = tuple(Rule(rule.action, rule.tool, tenant, rule.argv_prefix) for rule in tenant_policy.commands)
    return replace(policy, rules=policy.rules + rules)
