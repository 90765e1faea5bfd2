"""The tools and skills of each tenant: those that the workers publish, and the tenant's own skills, some of which are
tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.names import BUILTIN_TOOLS
from contract.schema import find_nearest
from contract.specs import SkillSummary, ToolSpec
from contract.tenancy import SKILL_TOOL
from store.catalog import CatalogSource
from store.skills import InstalledSkill, SkillStore

_FROM_SERVERS = "mcp__"
"""What names of MCP servers' tools begin with."""


@dataclass(frozen=True)
class Offer:
    """As it is now. `tools`: session verbs included; `skills`: by name, `own` those of them that are the tenant's."""

    tools: tuple[ToolSpec, ...]
    skills: tuple[SkillSummary, ...]
    own: frozenset[str]
    hiding: frozenset[str]
    """Own skills, in place of which the tenant would have the workers' of that name."""
    as_tools: frozenset[str]
    """Skills that are tools of their own name."""
    taken: frozenset[str]
    """Own skills that would be tools, had none of the workers' tools their name."""

    def describe(self, skill: str) -> dict[str, str | bool]:
        """Where a skill of that name is from, and what it is besides. `tool`: yes, no, or "name taken" by a tool of the
        workers.
        """
        tool = "yes" if skill in self.as_tools else "name taken" if skill in self.taken else "no"
        return {
            "source": "tenant" if skill in self.own else "system",
            "tool": tool,
            "hides_system": skill in self.hiding,
        }


class TenantCatalog:
    """The tools of all tenants of a deployment. `installed` None: tenants have no skills of their own. Raises
    ConfigError when no worker lives, BrokerUnavailable.
    """

    def __init__(self, catalog: CatalogSource, installed: SkillStore | None = None) -> None:
        self._catalog, self._installed = catalog, installed
        self.published: tuple[ToolSpec, ...] = ()
        """What the workers published when `find` was called last."""
        self._by_name: dict[str, ToolSpec] = {}
        self._skills: tuple[SkillSummary, ...] = ()
        self._system: dict[str, SkillSummary] = {}

    async def of(self, tenant: str) -> Offer:
        """All of it, in one round trip beside the catalog's."""
        tools = {spec.name: spec for spec in await self._catalog.specs() if spec.is_for(tenant)}
        system = {skill.name: skill for skill in await self._catalog.skills()}
        installed = await self._installed.all(tenant) if self._installed is not None else {}
        as_tools = {name for name, spec in tools.items() if _is_skills(spec, system)}
        wanted = (
            {name: tool for name, record in installed.items() if (tool := _as_tool(record)) is not None}
            if SKILL_TOOL in tools
            else {}
        )
        free = {name: tool for name, tool in wanted.items() if self._is_free(name, tools.get(name), system)}
        tools |= free
        skills = system | {name: record.skill for name, record in installed.items()}
        # A skill of the tenant's that is no tool hides the workers' tool of its name as well.
        for name in as_tools & installed.keys() - free.keys():
            del tools[name]
        return Offer(
            tuple(tools.values()),
            tuple(skills[name] for name in sorted(skills)),
            own=frozenset(installed),
            hiding=frozenset(system.keys() & installed.keys()),
            as_tools=frozenset((as_tools - installed.keys()) | free.keys()),
            taken=frozenset(wanted.keys() - free.keys()),
        )

    async def find(self, name: str, tenant: str, audience: str = "model") -> ToolSpec:
        """Return the tool of that name. `audience`: model, or session for its verbs. The tenant's skills are looked up
        only if one of them can be the tool.

        Raises ToolFailure(TOOL_NOT_FOUND) with the nearest names, ConfigError when no worker serves the tool now.
        """
        specs, skills = await self._catalog.specs(), await self._catalog.skills()
        if specs is not self.published or skills is not self._skills:
            # Catalogs are read once a second, tools are looked up for every call.
            self.published, self._by_name = specs, {spec.name: spec for spec in specs}
            self._skills, self._system = skills, {skill.name: skill for skill in skills}
        spec = self._published(name, tenant)
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
        has_skills = self._published(SKILL_TOOL, tenant) is not None
        return not is_verb and has_skills and self._is_free(name, spec, self._system)

    def _published(self, name: str, tenant: str) -> ToolSpec | None:
        spec = self._by_name.get(name)
        return spec if spec is not None and spec.is_for(tenant) else None

    def explain_missing(self, name: str) -> str | None:
        """Return why a tool that exists cannot be called now; None: no such tool is known. As of the last `of` or
        `find`.
        """
        return self._catalog.explain_missing(name)

    def _is_free(self, name: str, published: ToolSpec | None, system: Mapping[str, SkillSummary]) -> bool:
        """Whether a tenant's skill can be the tool of that name: it is nobody's, or a skill's of the workers, before
        which the tenant's goes.
        """
        if name in BUILTIN_TOOLS or name.startswith(_FROM_SERVERS):
            return False
        return _is_skills(published, system) if published is not None else self._catalog.explain_missing(name) is None


def _as_tool(record: InstalledSkill) -> ToolSpec | None:
    """Whatever was kept of it: it is judged as a tenant's."""
    return record.tool.model_copy(update={"is_installed_skill": True}) if record.tool is not None else None


def _is_skills(spec: ToolSpec, system: Mapping[str, SkillSummary]) -> bool:
    """Whether the workers' tool is one of their skills."""
    is_other = spec.name in BUILTIN_TOOLS or spec.name.startswith(_FROM_SERVERS)
    return spec.pool == "sandbox" and spec.audience == "model" and spec.name in system and not is_other
