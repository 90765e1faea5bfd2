"""Whether a tenant's policy lets a call through: asked before it is sent and, since the queue is not trusted, before it is run."""

from collections.abc import Mapping
from typing import Any

from contract.errors import ErrorCode, ToolFailure
from contract.shell.command_rules import read_command, touches
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy

RELEASING = frozenset({"session.close", "session.cancel"})
"""Verbs that only end things: served for tenants that are registered no more, so that nothing of theirs is left over."""


def check_call(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """By arguments as `prepare_arguments` gives them: aliases are folded, so none hides a command.

    Raises ToolFailure: PERMISSION_DENIED for a tool that the tenant may not use, SECURITY_REFUSED for a command that a `deny` rule is about.
    """
    if not policy.allows_tool(spec.name):
        raise ToolFailure(
            ErrorCode.PERMISSION_DENIED,
            f"{spec.name} was not run: it is not allowed for tenant {tenant}; use another tool, or have the operator allow it "
            f"(toolcrew tenants set {tenant} --tools ...)",
            was_refused=True,
        )
    rules = [rule for rule in policy.commands if rule.action == "deny" and rule.is_about(spec.name)]
    if not rules:
        return
    script = read_command(spec, arguments)
    denying = next((rule for rule in rules if touches(rule.argv_prefix, script)), None)
    if denying is not None:
        words = f"commands with '{' '.join(denying.argv_prefix)}' are" if denying.argv_prefix else "it is"
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED if denying.argv_prefix else ErrorCode.PERMISSION_DENIED,
            f"{spec.name} was not run: {words} forbidden by the policy of tenant {tenant}; do without, or ask the operator",
            was_refused=True,
        )
