"""Checks of a stream against the policy of its tenant."""

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.stream_tickets import PROCESS, READ_FILES, WRITE_FILES
from toolcrew.contract.tenancy import VERB_TOOLS, TenantPolicy
from toolcrew.store.tenants import TenantSource

_VERBS = {PROCESS: "session.exec", READ_FILES: "session.read_file", WRITE_FILES: "session.write_file"}
"""The session verb that does the same as a stream. A policy that forbids the verb also forbids the stream."""


async def check_stream(tenants: TenantSource, tenant: str, permission: str) -> None:
    """Check that a tenant may open a stream, or keep it open. `permission`: of contract/stream_tickets.py.

    Raises ToolFailure: UNKNOWN_TENANT, BUDGET_EXCEEDED, RATE_LIMITED while the tenant is paused, PERMISSION_DENIED.
    Raises BrokerUnavailable, ConfigError.
    """
    policy = await tenants.policy(tenant)
    if policy.is_paused:
        reason = f" ({policy.pause_reason})" if policy.pause_reason else ""
        raise ToolFailure(
            ErrorCode.RATE_LIMITED, f"tenant {tenant} is paused{reason}: try again when it is resumed", is_paused=True
        )
    await tenants.check_budgets(tenant)
    _check_policy(policy, tenant, permission)


def _check_policy(policy: TenantPolicy, tenant: str, permission: str) -> None:
    if policy.streams == "refuse":
        raise _deny(f"streams are not allowed for tenant {tenant}")
    verb = _VERBS.get(permission)
    if verb is None:
        return
    if not policy.allows_tool(verb) or any(
        rule.action == "deny" and rule.is_about(verb) and not rule.argv_prefix for rule in policy.commands
    ):
        raise _deny(f"{verb} is not allowed for tenant {tenant}")
    # A rule for the verb is also about its tool, but a rule with the name of the verb is not about the tool.
    has_rules = any(rule.action != "allow" and rule.is_about(verb) for rule in policy.commands)
    if permission == PROCESS and has_rules and policy.streams is None:
        raise _deny(
            f"the policy of tenant {tenant} has rules for the commands of {VERB_TOOLS[verb]}, which cannot be checked "
            "in a stream"
        )


def _deny(reason: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.PERMISSION_DENIED,
        f"the stream was not opened: {reason}; use calls, or have the operator set `streams` of the tenant's policy to "
        "allow",
    )
