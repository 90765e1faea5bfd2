"""Tools by name: registering, looking up, filtering, turning off and on. Safe under concurrent access."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from contract.calls import Record
from contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from contract.schema import check_schema, prepare_arguments
from contract.shell.command_rules import read_command, touches
from contract.signing import SigningKeys
from contract.specs import ToolSpec
from contract.tenancy import TenantPolicy, say_subject, tools_of

Handler = TypeVar("Handler")
Validator = Callable[[Mapping[str, Any]], str | None]
"""A custom check of valid arguments: None, or a sentence that says what is wrong and what to do."""
SWITCHES_FRESH_S = 1.0
"""How old may be what a process knows of the switches: half of the time within which one takes effect everywhere."""
LAST_INSTANT = 253_402_300_800
"""The year 10000, which no calendar of ours can show."""


class Switch(Record):
    """That a tool is off: by whom, since when (Unix seconds), why. A tool without one is on."""

    by: str = Field(default="", max_length=128)
    at: float = Field(default=0.0, ge=0, lt=LAST_INSTANT)
    reason: str | None = Field(default=None, max_length=1024)

    def refusal(self, name: str) -> str:
        """What a model is told that calls the tool nevertheless."""
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"the tool {name} is turned off by an administrator{why}: do not call it again; use another tool, or say "
            "what cannot be done"
        )


@dataclass(frozen=True)
class ToolState:
    """A registered tool as an administrator sees it. `everywhere`: present exactly when it is off for all tenants;
    `own`: when it is for the one whose view this is, whatever holds for all."""

    spec: ToolSpec
    everywhere: Switch | None = None
    own: Switch | None = None
    is_allowed: bool = True
    """Whether the policy of the tenant allows the tool."""

    @property
    def switch(self) -> Switch | None:
        """Why it is off, None when it is on."""
        return self.everywhere or self.own

    @property
    def scope(self) -> Literal["everywhere", "tenant"] | None:
        """For whom it is off, None when it is on."""
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
        """`forbidden`: the tenant's policy does not allow the tool, whether it is turned on or off."""
        if not self.is_allowed:
            return "forbidden"
        return "enabled" if self.switch is None else "disabled"


@dataclass(frozen=True)
class Tool(Generic[Handler]):
    """A spec, what runs it, and its custom checks. Each package of ours has its own handler type."""

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
        """The JSON Schema of the arguments."""
        return self.spec.parameters

    @property
    def requires_permission(self) -> bool:
        return self.spec.requires_permission

    @property
    def is_dangerous(self) -> bool:
        return self.spec.dangerous

    def execute(self, arguments: Mapping[str, Any], context: Any) -> Any:
        """Run the handler with checked arguments and the context that it takes. Returns its result; an awaitable of it
        for an async handler.

        Raises ToolFailure(INVALID_ARGUMENTS), and what the handler raises.
        """
        handler = cast(Callable[[dict[str, Any], Any], Any], self.handler)
        return handler(prepare_arguments(self.spec, arguments, checks=self.validators)[0], context)


class ToolRegistry(Generic[Handler]):
    """Tools by name. Registering a name again replaces the tool, and does not turn it on; an unknown name gives None,
    never an exception.

    Two views: `describe` lists all that is registered, `specs` what a model may be told of. `get` finds what is off,
    too: who runs tools asks `switch` first.
    """

    def __init__(self, tools: Iterable[Tool[Handler]] = ()) -> None:
        self._lock = threading.Lock()
        self._tools: dict[str, Tool[Handler]] = {}
        self._switches: dict[str, Switch] = {}
        for tool in tools:
            self.register(tool)

    def free_after_fork(self) -> None:
        """From now on a process that is forked while another thread changes the registry gets it whole, with nobody
        holding its lock.
        """
        lock = self._lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

    def register(self, tool: Tool[Handler]) -> None:
        """Add `tool` under its spec's name; a tool of that name is replaced. Raises jsonschema.SchemaError for
        parameters that no call could meet.
        """
        check_schema(tool.spec.parameters)
        with self._lock:
            self._tools[tool.spec.name] = tool

    def withdraw(self, name: str) -> None:
        """Have no tool of that name any more. Who turned it off finds it off when it comes back."""
        with self._lock:
            self._tools.pop(name, None)

    def get(self, name: str) -> Tool[Handler] | None:
        """The tool of that name, on or off, or None."""
        with self._lock:
            return self._tools.get(name)

    def disable(self, name: str, switch: Switch | None = None) -> bool:
        """Turn the tool off until `enable`; False when there is none of that name. Raises ValueError for a verb of
        sessions: none works without.
        """
        with self._lock:
            tool = self._tools.get(name)
            if tool is None:
                return False
            if tool.spec.audience == "session":
                raise ValueError(f"{name} is a verb of sessions, which cannot be turned off")
            self._switches[name] = switch or Switch()
            return True

    def enable(self, name: str) -> bool:
        """Turn the tool on; False when there is none of that name."""
        with self._lock:
            self._switches.pop(name, None)
            return name in self._tools

    def switch(self, name: str) -> Switch | None:
        """Why the tool of that name is off; None when it is on, or not there."""
        with self._lock:
            return self._switches.get(name)

    def describe(self) -> list[ToolState]:
        """Every registered tool with its state, by name order."""
        with self._lock:
            return [ToolState(self._tools[name].spec, self._switches.get(name)) for name in sorted(self._tools)]

    def specs(self, names: Iterable[str] | Literal["all"] = "all") -> list[ToolSpec]:
        """Specs of the tools that are on, by name order; `names` keeps only those, "all" (alone or in the list) keeps
        every one.
        """
        with self._lock:
            found = [self._tools[name].spec for name in sorted(self._tools) if name not in self._switches]
        return filter_specs(found, names)

    def __len__(self) -> int:
        with self._lock:
            return len(self._tools)


def switch_field(name: str, tenant: str | None = None) -> str:
    """Under which a switch is kept: for everybody, or for one tenant. No name of a tool or of a tenant has a `/`."""
    return name if tenant is None else f"{tenant}/{name}"


def find_switch(switches: Mapping[str, Switch], name: str, tenant: str) -> Switch | None:
    """Why the tool is off for that tenant, by all the switches that there are; None when it is on."""
    return switches.get(name) or switches.get(switch_field(name, tenant))


def switches_for(switches: Mapping[str, Switch], tenant: str) -> dict[str, Switch]:
    """What is off for that tenant, by the tools' names."""
    head = switch_field("", tenant)
    own = {field.removeprefix(head): switch for field, switch in switches.items() if field.startswith(head)}
    return own | {field: switch for field, switch in switches.items() if "/" not in field}


def seal_switch(keys: SigningKeys, field: str, switch: Switch) -> str:
    """Return the signed switch. It is valid for this field only."""
    return keys.seal(f"switch {field}", switch.model_dump_json())


def parse_switches(keys: SigningKeys, sealed: Mapping[bytes, bytes]) -> dict[str, Switch]:
    """Return the switches of a Redis hash by their fields.

    A switch that cannot be verified or read still turns its tool off, so that a damaged record never turns a tool on.
    Its text is not used.
    """
    found = {}
    for name, data in sealed.items():
        field = name.decode(errors="replace")
        try:
            switch = Switch.model_validate_json(keys.unseal(f"switch {field}", data))
        except (EnvelopeRefused, ValidationError):
            switch = Switch(reason="its record in Redis cannot be verified: turn the tool on or off again")
        found[field] = switch
    return found


def filter_specs(specs: Iterable[ToolSpec], names: Iterable[str] | Literal["all"]) -> list[ToolSpec]:
    """Those specs whose name is in `names`; "all" means every one."""
    if isinstance(names, str):
        names = [names]
    wanted = set(names)
    return [spec for spec in specs if "all" in wanted or spec.name in wanted]


def find_state(spec: ToolSpec, switches: Mapping[str, Switch], tenant: str, policy: TenantPolicy) -> ToolState:
    """Return the tool's state for a tenant with that policy, as an administrator sees it."""
    return ToolState(
        spec, switches.get(spec.name), switches.get(switch_field(spec.name, tenant)), policy.allows_tool(spec.name)
    )


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
