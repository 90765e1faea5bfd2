"""Registry of tools: register, look up, filter, disable and enable. Safe under concurrent access."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.schema import check_schema, prepare_arguments
from toolcrew.contract.shell.command_rules import matches_command, read_command
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import TenantPolicy, build_refusal_subject, tools_of

Handler = TypeVar("Handler")
Validator = Callable[[Mapping[str, Any]], str | None]
"""Custom check of arguments that match the schema. Returns None, or a sentence: what is wrong and what to do."""
SWITCHES_FRESH_S = 1.0
"""Maximum age, in seconds, of a process's cached switches (records that disable tools). A switch takes effect
everywhere within twice this time.
"""
LAST_INSTANT = 253_402_300_800
"""Unix time of the start of the year 10000, the first time that datetime cannot represent."""


class Switch(Record):
    """Record of a disabled tool: actor, time (Unix seconds) and reason. A tool without a record is enabled."""

    by: str = Field(default="", max_length=128)
    at: float = Field(default=0.0, ge=0, lt=LAST_INSTANT)
    reason: str | None = Field(default=None, max_length=1024)

    def refusal(self, name: str) -> str:
        """Return the error text that a model gets when it calls the disabled tool."""
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"an operator has disabled the tool {name}{reason}. Do not call it again. Use another tool, or say what "
            "cannot be done"
        )


@dataclass(frozen=True)
class ToolState:
    """Registered tool as an administrator sees the tool.

    `everywhere`: the switch for all tenants. `own`: the switch for the tenant of this view. Each is None if the tool
    is enabled there.
    """

    spec: ToolSpec
    everywhere: Switch | None = None
    own: Switch | None = None
    is_allowed: bool = True
    """True if the tenant's policy allows the tool."""

    @property
    def switch(self) -> Switch | None:
        """Switch that disables the tool, or None if the tool is enabled."""
        return self.everywhere or self.own

    @property
    def scope(self) -> Literal["everywhere", "tenant"] | None:
        """Tenants that the tool is disabled for; None if the tool is enabled."""
        if self.everywhere is not None:
            return "everywhere"
        return "tenant" if self.own is not None else None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def description(self) -> str:
        return self.spec.description

    @property
    def state(self) -> Literal["enabled", "disabled", "forbidden"]:
        """State of the tool. `forbidden`: the tenant's policy does not allow the tool, even if it is enabled."""
        if not self.is_allowed:
            return "forbidden"
        return "enabled" if self.switch is None else "disabled"


@dataclass(frozen=True)
class Tool(Generic[Handler]):
    """Tool with its spec, its handler and its custom checks. Each package has its own handler type."""

    spec: ToolSpec
    handler: Handler
    validators: tuple[Validator, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def description(self) -> str:
        return self.spec.description

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        return self.spec.parameters

    @property
    def requires_permission(self) -> bool:
        return self.spec.requires_permission

    @property
    def is_dangerous(self) -> bool:
        return self.spec.dangerous

    def execute(self, arguments: Mapping[str, Any], context: Any) -> Any:
        """Check the arguments and run the handler. Return the handler's result, or an awaitable for an async handler.

        Raises ToolFailure(INVALID_ARGUMENTS) for invalid arguments. Exceptions of the handler propagate.
        """
        handler = cast(Callable[[dict[str, Any], Any], Any], self.handler)
        return handler(prepare_arguments(self.spec, arguments, checks=self.validators)[0], context)


class ToolRegistry(Generic[Handler]):
    """Tools by name.

    A second registration of a name replaces the tool and does not enable it. Lookups of an unknown name return None.
    `describe` lists all registered tools; `specs` lists the enabled tools, which a model may see. `get` also returns
    disabled tools: check `switch` before running a tool.
    """

    def __init__(self, tools: Iterable[Tool[Handler]] = ()) -> None:
        self._lock = threading.Lock()
        self._tools: dict[str, Tool[Handler]] = {}
        self._switches: dict[str, Switch] = {}
        for tool in tools:
            self.register(tool)

    def lock_during_fork(self) -> None:
        """Hold the lock during every later fork of this process.

        Without this, a fork while another thread changes the registry gives the child an inconsistent registry and a
        lock that no thread releases.
        """
        lock = self._lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

    def register(self, tool: Tool[Handler]) -> None:
        """Add the tool, or replace the tool of the same name. Raises jsonschema.SchemaError for an invalid parameter
        schema.
        """
        check_schema(tool.spec.parameters)
        with self._lock:
            self._tools[tool.spec.name] = tool

    def unregister(self, name: str) -> None:
        """Remove the tool of that name. Its switch stays: a tool that is registered again later is still disabled."""
        with self._lock:
            self._tools.pop(name, None)

    def get(self, name: str) -> Tool[Handler] | None:
        """Return the tool of that name, enabled or disabled; None if there is none."""
        with self._lock:
            return self._tools.get(name)

    def disable(self, name: str, switch: Switch | None = None) -> bool:
        """Disable the tool until `enable`. Return False if no tool has that name. Raises ValueError for a session verb
        (a call of the SDK, such as `session.open`), because no session works without it.
        """
        with self._lock:
            tool = self._tools.get(name)
            if tool is None:
                return False
            if tool.spec.audience == "session":
                raise ValueError(f"{name} is a session verb and cannot be disabled. Disable tools instead.")
            self._switches[name] = switch or Switch()
            return True

    def enable(self, name: str) -> bool:
        """Enable the tool. Return False if no tool has that name."""
        with self._lock:
            self._switches.pop(name, None)
            return name in self._tools

    def switch(self, name: str) -> Switch | None:
        """Return the record that disables the tool; None if the tool is enabled or not registered."""
        with self._lock:
            return self._switches.get(name)

    def describe(self) -> list[ToolState]:
        """Return every registered tool with its state, sorted by name."""
        with self._lock:
            return [ToolState(self._tools[name].spec, self._switches.get(name)) for name in sorted(self._tools)]

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        """Return the specs of the enabled tools, sorted by name. `names` selects tools; "all", alone or in the list,
        selects every tool.
        """
        with self._lock:
            specs = [self._tools[name].spec for name in sorted(self._tools) if name not in self._switches]
        return filter_specs(specs, names)

    def __len__(self) -> int:
        with self._lock:
            return len(self._tools)


def switch_field(name: str, tenant: str | None = None) -> str:
    """Return the field, in the Redis hash of switches, that disables a tool for all tenants or for one tenant. Tool and
    tenant names contain no `/`.
    """
    return name if tenant is None else f"{tenant}/{name}"


def find_switch(switches: Mapping[str, Switch], name: str, tenant: str) -> Switch | None:
    """Return the switch that disables the tool for that tenant; None if the tool is enabled."""
    return switches.get(name) or switches.get(switch_field(name, tenant))


def switches_for(switches: Mapping[str, Switch], tenant: str) -> dict[str, Switch]:
    """Return the switches of the tools that are disabled for that tenant, by tool name."""
    prefix = switch_field("", tenant)
    own = {field.removeprefix(prefix): switch for field, switch in switches.items() if field.startswith(prefix)}
    return own | {field: switch for field, switch in switches.items() if "/" not in field}


def seal_switch(keys: SigningKeys, field: str, switch: Switch) -> str:
    """Return the signed switch. The signature is valid for this field only."""
    return keys.seal(f"switch {field}", switch.model_dump_json())


def parse_switches(keys: SigningKeys, sealed: Mapping[bytes, bytes]) -> dict[str, Switch]:
    """Return the switches of a Redis hash by their fields.

    A switch that cannot be verified or read still turns its tool off, so that a damaged record never turns a tool on.
    Its text is not used.
    """
    switches = {}
    for name, data in sealed.items():
        field = name.decode(errors="replace")
        try:
            switch = Switch.model_validate_json(keys.unseal(f"switch {field}", data))
        except (EnvelopeRefused, ValidationError):
            switch = Switch(reason="its record in Redis cannot be verified: enable or disable the tool again")
        switches[field] = switch
    return switches


def filter_specs(specs: Iterable[ToolSpec], names: Iterable[str] | Literal["all"]) -> list[ToolSpec]:
    """Return the specs whose name is in `names`; "all" selects every spec."""
    selected = {names} if isinstance(names, str) else set(names)
    return [spec for spec in specs if "all" in selected or spec.name in selected]


def find_state(spec: ToolSpec, switches: Mapping[str, Switch], tenant: str, policy: TenantPolicy) -> ToolState:
    """Return the tool's state for a tenant with that policy."""
    return ToolState(
        spec, switches.get(spec.name), switches.get(switch_field(spec.name, tenant)), policy.allows_tool(spec.name)
    )


RELEASING = frozenset({"session.close", "session.cancel", "session.delete_checkpoint"})
"""Session verbs (calls of the SDK that are no tools) that only release resources. Workers also serve them for tenants
that are no longer registered or have used up a budget, so that their sessions, calls and checkpoints can be cleaned up.
"""


def check_call(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Check a call against the policy of its tenant. `arguments`: the result of `prepare_arguments`, which replaces
    aliases, so that no alias hides a command.

    Raises ToolFailure: PERMISSION_DENIED for a tool that the tenant may not use, SECURITY_REFUSED for a command that
    matches a `deny` rule.
    """
    check_tools(policy, tenant, spec, arguments)
    tools = tools_of(spec, arguments)
    rules = [(rule, tool) for rule in policy.commands if rule.action == "deny" for tool in tools if rule.is_about(tool)]
    if not rules:
        return
    script = read_command(spec, arguments)
    denying = next(((rule, tool) for rule, tool in rules if matches_command(rule.argv_prefix, script)), None)
    if denying is not None:
        rule, tool = denying
        subject = (
            f"commands with '{' '.join(rule.argv_prefix)}' are"
            if rule.argv_prefix
            else f"{build_refusal_subject(spec.name, tool)} is"
        )
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED if rule.argv_prefix else ErrorCode.PERMISSION_DENIED,
            f"{spec.name} was not run: {subject} forbidden by the policy of tenant {tenant}; use another command, or "
            "ask the operator",
            was_refused=True,
        )


def check_tools(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Check that the tenant may use the tools of a call, without reading its command. Raises
    ToolFailure(PERMISSION_DENIED).
    """
    for used in tools_of(spec, arguments):
        if not policy.allows_tool(used):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"{spec.name} was not run: {build_refusal_subject(spec.name, used)} is not allowed for "
                f"tenant {tenant}; use another tool, or have the operator allow it "
                f"(toolcrew tenants set {tenant} --tools NAMES)",
                was_refused=True,
            )


def check_switches(
    find: Callable[[str], Switch | None], spec: ToolSpec, arguments: Mapping[str, Any] | None = None
) -> None:
    """Check that the tools of a call are enabled. Session verbs are always enabled.

    `find` returns the switch of a tool by name. `arguments`: prepared arguments; without them, only the called tool is
    checked. Raises ToolFailure(TOOL_DISABLED). Exceptions of `find` propagate.
    """
    if spec.audience == "session":
        return
    for used in tools_of(spec, arguments or {}):
        switch = find(used)
        if switch is not None:
            prefix = "" if used == spec.name else f"{spec.name} was not run, because it runs a program as {used} does: "
            raise ToolFailure(ErrorCode.TOOL_DISABLED, prefix + switch.refusal(used))
