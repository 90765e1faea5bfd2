"""What a tenant's policy means for one call: whether it is sent at all, and what is asked about before."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contract.errors import ConfigError, ToolFailure
from contract.policy_checks import RELEASING, check_call, check_switches, check_tools
from contract.registry import Switch, find_switch
from contract.schema import prepare_arguments
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy, tools_of
from orchestrator.approvals.policies import ApprovalPolicy, Rule
from store.tenants import TenantSource

MAX_INLINE_CHARS = 4 * 1024
"""Longer commands are judged beside the loop: hostile ones take up to a second."""


async def policy_for(tenants: TenantSource, tenant: str, tool: str) -> TenantPolicy:
    """What the tenant may have, for a call of that tool; for what only ends things also when it is registered no more.

    Raises ToolFailure(UNKNOWN_TENANT), BrokerUnavailable, ConfigError for a policy that cannot be read.
    """
    try:
        return await tenants.policy(tenant)
    except (ToolFailure, ConfigError):
        if tool not in RELEASING:
            raise
        return TenantPolicy()


async def refuse_by_policy(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """By prepared arguments. Raises ToolFailure: PERMISSION_DENIED, SECURITY_REFUSED (contract/policy_checks.py)."""
    if policy.commands and spec.command_parameter is not None and len(str(arguments)) > MAX_INLINE_CHARS:
        await asyncio.to_thread(check_call, policy, tenant, spec, arguments)
    else:
        check_call(policy, tenant, spec, arguments)


def is_offered(switches: Mapping[str, Switch], policy: TenantPolicy, spec: ToolSpec) -> bool:
    """Whether models of the tenant are told of the tool. `switches`: by tool, those that count for the tenant."""
    return spec.audience == "model" and all(
        used not in switches and policy.allows_tool(used) for used in tools_of(spec, {})
    )


def refuse_unasked(
    switches: Mapping[str, Switch], policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]
) -> None:
    """Nobody is asked about a call that will not be run, whatever the answer. By arguments as they were given.

    Raises ToolFailure: TOOL_DISABLED, PERMISSION_DENIED; none for invalid arguments, of which whoever reviews the call
    tells.
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
    """The approval policy with the tenant's own rules beside its own: of all that match, deny goes before ask and ask
    before allow.
    """
    if not tenant_policy.commands:
        return policy
    rules = tuple(Rule(rule.action, rule.tool, tenant, rule.argv_prefix) for rule in tenant_policy.commands)
    return replace(policy, rules=policy.rules + rules)
