"""Tools and skills of each tenant, and the rules for their calls.

The workers publish tools. A tenant's own skills add to them; some of these skills are tools. The switches of
administrators and the policy of the tenant forbid calls. This module also decides which approval rules apply to a
run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.contract.registry import RELEASING, Switch, check_call, check_switches, check_tools, find_switch
from toolcrew.contract.schema import find_nearest, prepare_arguments
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL, TenantPolicy, tools_of
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.store.skills import InstalledSkill, SkillStore
from toolcrew.store.tenants import OpenTenants, TenantSource
from toolcrew.store.tools import CatalogSource, SwitchSource

_FROM_SERVERS = "mcp__"
"""Prefix of the names of tools from MCP servers."""


@dataclass(frozen=True)
class Offer:
    """The tools and skills that one tenant may use now. `tools`: all tools, including the session verbs, such as
    `session.open`, which models never see. `skills`: all skills, by name. `own`: the names of the tenant's own skills.
    """

    tools: tuple[ToolSpec, ...]
    skills: tuple[SkillSummary, ...]
    own: frozenset[str]
    hiding: frozenset[str]
    """Names of the tenant's own skills that replace a skill of the workers."""
    as_tools: frozenset[str]
    """Names of the skills that are also tools of the same name."""
    name_taken: frozenset[str]
    """Names of the tenant's own skills that are no tools, because a tool of the workers has the same name."""

    def describe(self, skill: str) -> dict[str, str | bool]:
        """Return the source and the kind of a skill. `tool`: "yes", "no", or "name taken" if a tool of the workers
        has the name.
        """
        tool = "yes" if skill in self.as_tools else "name taken" if skill in self.name_taken else "no"
        return {
            "source": "tenant" if skill in self.own else "system",
            "tool": tool,
            "hides_system": skill in self.hiding,
        }


class TenantCatalog:
    """Finds the tools of all tenants of a deployment. `installed` None: tenants have no skills of their own. All
    methods raise ConfigError when no worker lives, and BrokerUnavailable.
    """

    def __init__(self, catalog: CatalogSource, installed: SkillStore | None = None) -> None:
        self._catalog = catalog
        self._installed = installed
        self.published: tuple[ToolSpec, ...] = ()
        """Tools that the workers published at the last call of `find`."""
        self._by_name: dict[str, ToolSpec] = {}
        self._skills: tuple[SkillSummary, ...] = ()
        self._system: dict[str, SkillSummary] = {}

    async def of(self, tenant: str) -> Offer:
        """Return all tools and skills of the tenant. Reads the tenant's skills from Redis each time; the catalog of the
        workers is cached.
        """
        tools = {spec.name: spec for spec in await self._catalog.specs() if spec.is_for(tenant)}
        system = {skill.name: skill for skill in await self._catalog.skills()}
        installed = await self._installed.all(tenant) if self._installed is not None else {}
        as_tools = {name for name, spec in tools.items() if _is_skills(spec, system)}
        candidates = (
            {name: tool for name, record in installed.items() if (tool := _as_tool(record)) is not None}
            if SKILL_TOOL in tools
            else {}
        )
        free = {name: tool for name, tool in candidates.items() if self._is_free(name, tools.get(name), system)}
        tools |= free
        skills = system | {name: record.skill for name, record in installed.items()}
        # A tenant's skill that is not a tool also hides the workers' tool with its name.
        for name in as_tools & installed.keys() - free.keys():
            del tools[name]
        return Offer(
            tuple(tools.values()),
            tuple(skills[name] for name in sorted(skills)),
            own=frozenset(installed),
            hiding=frozenset(system.keys() & installed.keys()),
            as_tools=frozenset((as_tools - installed.keys()) | free.keys()),
            name_taken=frozenset(candidates.keys() - free.keys()),
        )

    async def find(self, name: str, tenant: str, audience: str = "model") -> ToolSpec:
        """Return the tool of that name. `audience`: "model", or "session" for session verbs such as `session.open`. The
        tenant's skills are read only if one of them can be the tool.

        Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ConfigError when no worker serves the tool now.
        """
        specs, skills = await self._catalog.specs(), await self._catalog.skills()
        if specs is not self.published or skills is not self._skills:
            # The catalog changes at most once a second, and every call looks up a tool.
            self.published, self._by_name = specs, {spec.name: spec for spec in specs}
            self._skills, self._system = skills, {skill.name: skill for skill in skills}
        spec = self._find_published(name, tenant)
        if self._installed is not None and self._may_be_own(name, tenant, spec):
            record = await self._installed.find(tenant, name)
            spec = _as_tool(record) if record is not None else spec
        if spec is not None and spec.audience == audience:
            return spec
        missing = self._catalog.explain_missing(name)
        if missing is not None:
            raise ConfigError(missing)
        names = [spec.name for spec in specs if spec.audience == audience and spec.is_for(tenant)]
        raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {name}", nearest=find_nearest(name, names))

    def _may_be_own(self, name: str, tenant: str, spec: ToolSpec | None) -> bool:
        is_verb = spec is not None and spec.audience != "model"
        has_skills = self._find_published(SKILL_TOOL, tenant) is not None
        return not is_verb and has_skills and self._is_free(name, spec, self._system)

    def _find_published(self, name: str, tenant: str) -> ToolSpec | None:
        spec = self._by_name.get(name)
        return spec if spec is not None and spec.is_for(tenant) else None

    def explain_missing(self, name: str) -> str | None:
        """Return the reason why an existing tool cannot be called now; None if the tool does not exist. Uses the
        catalog of the last `of` or `find`.
        """
        return self._catalog.explain_missing(name)

    def _is_free(self, name: str, published: ToolSpec | None, system: Mapping[str, SkillSummary]) -> bool:
        """Return whether a tenant's skill can be the tool of that name: no tool has the name, or a skill of the
        workers has it. The tenant's skill takes precedence over a skill of the workers.
        """
        if name in BUILTIN_TOOLS or name.startswith(_FROM_SERVERS):
            return False
        return _is_skills(published, system) if published is not None else self._catalog.explain_missing(name) is None


def _as_tool(record: InstalledSkill) -> ToolSpec | None:
    """Return the skill as a tool. Flags in the stored data cannot give the tool more rights than a tenant's skill may
    have.
    """
    return record.tool.model_copy(update={"is_installed_skill": True}) if record.tool is not None else None


def _is_skills(spec: ToolSpec, system: Mapping[str, SkillSummary]) -> bool:
    """Return whether the workers' tool is one of their skills."""
    is_other = spec.name in BUILTIN_TOOLS or spec.name.startswith(_FROM_SERVERS)
    return spec.pool == "sandbox" and spec.audience == "model" and spec.name in system and not is_other


MAX_INLINE_CHARS = 4 * 1024
"""Number of characters above which a command is checked in a thread. A hostile command can take up to one second."""


@dataclass(frozen=True)
class CallRules:
    """Rules for the calls of tenants. `switches` None: no tool can be turned off."""

    tenants: TenantSource = field(default_factory=OpenTenants)
    switches: SwitchSource | None = None

    async def policy(self, tenant: str, tool: str) -> TenantPolicy:
        """Return the tenant's policy for a call of that tool. A tenant that is no longer registered may still call
        tools that only release resources.

        Raises ToolFailure(UNKNOWN_TENANT, BUDGET_EXCEEDED; QUOTA_EXCEEDED if the call stores files),
        BrokerUnavailable, ConfigError for a policy that cannot be read.
        """
        try:
            policy = await self.tenants.policy(tenant)
            if tool not in RELEASING:
                await self.tenants.check_budgets(tenant)
            if tool == "session.save_files":
                await self.tenants.check_storage(tenant)
            return policy
        except (ToolFailure, ConfigError):
            if tool not in RELEASING:
                raise
            return TenantPolicy()

    async def check_switch(self, spec: ToolSpec, tenant: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Raise ToolFailure(TOOL_DISABLED) for a tool that an administrator has turned off. Raises BrokerUnavailable
        when the switches cannot be read.
        """
        if self.switches is not None and spec.audience == "model":
            switches = await self.switches.switches()
            check_switches(lambda name: find_switch(switches, name, tenant), spec, arguments)


async def check_policy(policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Check prepared arguments. Raises ToolFailure: PERMISSION_DENIED, SECURITY_REFUSED (contract/registry.py)."""
    if policy.commands and spec.command_parameter is not None and len(str(arguments)) > MAX_INLINE_CHARS:
        await in_tenant_thread(tenant, check_call, policy, tenant, spec, arguments)
    else:
        check_call(policy, tenant, spec, arguments)


def is_offered(switches: Mapping[str, Switch], policy: TenantPolicy, spec: ToolSpec) -> bool:
    """Return whether models of the tenant see the tool. `switches`: the tenant's switches, by tool name."""
    return spec.audience == "model" and all(
        used not in switches and policy.allows_tool(used) for used in tools_of(spec, {})
    )


def refuse_before_approval(
    switches: Mapping[str, Switch], policy: TenantPolicy, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]
) -> None:
    """Refuse a call that cannot run even with an approval, so that no approver is asked. `arguments`: the unchecked
    arguments of the caller.

    Raises ToolFailure(TOOL_DISABLED) or ToolFailure(PERMISSION_DENIED). Invalid arguments raise nothing here; the
    review reports them.
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
    """Return the approval policy with the tenant's own rules added. Among matching rules, deny takes precedence over
    ask, and ask over allow.
    """
    if not tenant_policy.commands:
        return policy
    rules = tuple(Rule(rule.action, rule.tool, tenant, rule.argv_prefix) for rule in tenant_policy.commands)
    return replace(policy, rules=policy.rules + rules)
