"""Whether the switches and a tenant's policy let a call through: asked before it is sent and, since the queue is not
trusted, before it is run.
"""

from collections.abc import Callable, Mapping
from typing import Any

from contract.errors import ErrorCode, ToolFailure
from contract.registry import Switch
from contract.shell.command_rules import read_command, touches
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy, say_subject, tools_of

RELEASING = frozenset({"session.close", "session.cancel"})
"""Verbs that only end things: served for tenants that are registered no more, so that nothing of theirs is left
over.
"""


def check_call(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """By arguments as `prepare_arguments` gives them: aliases are folded, so none hides a command.

    Raises ToolFailure: PERMISSION_DENIED for a tool that the tenant may not use, SECURITY_REFUSED for a command that a
    `deny` rule is about.
    """
    check_tools(policy, tenant, spec, arguments)
    used = tools_of(spec, arguments)
    rules = [(rule, one) for rule in policy.commands if rule.action == "deny" for one in used if rule.is_about(one)]
    if not rules:
        return
    script = read_command(spec, arguments)
    denying = next(((rule, one) for rule, one in rules if touches(rule.argv_prefix, script)), None)
    if denying is not None:
        rule, one = denying
        words = (
            f"commands with '{' '.join(rule.argv_prefix)}' are"
            if rule.argv_prefix
            else f"{say_subject(spec.name, one)} is"
        )
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED if rule.argv_prefix else ErrorCode.PERMISSION_DENIED,
            f"{spec.name} was not run: {words} forbidden by the policy of tenant {tenant}; do without, or ask the "
            "operator",
            was_refused=True,
        )


def check_tools(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Of `check_call` the part that reads no command. Raises ToolFailure(PERMISSION_DENIED)."""
    for used in tools_of(spec, arguments):
        if not policy.allows_tool(used):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"{spec.name} was not run: {say_subject(spec.name, used)} is not allowed for tenant {tenant}; use "
                f"another tool, or have the operator allow it (toolcrew tenants set {tenant} --tools NAMES)",
                was_refused=True,
            )


def check_switches(
    find: Callable[[str], Switch | None], spec: ToolSpec, arguments: Mapping[str, Any] | None = None
) -> None:
    """By prepared arguments; None, before they are: the called tool alone. `find`: why the tool of a name is off. Verbs
    of sessions are never off.

    Raises ToolFailure(TOOL_DISABLED), and what `find` raises.
    """
    if spec.audience == "session":
        return
    for used in tools_of(spec, arguments or {}):
        switch = find(used)
        if switch is not None:
            other = (
                "" if used == spec.name else f"{spec.name} was not run, since it would run a program as {used} does: "
            )
            raise ToolFailure(ErrorCode.TOOL_DISABLED, other + switch.refusal(used))
