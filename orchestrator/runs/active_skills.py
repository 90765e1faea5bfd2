"""The skills whose instructions a run has loaded, and the calls that these ask for and its tenant trusts them with.

A skill's `allowed-tools` only ever saves a question: what is forbidden, turned off or catastrophic stays so, and what a
rule wants asked is asked.
"""

from collections.abc import Collection, Iterable, Mapping

from contract.calls import ToolCall, ToolResult
from contract.specs import SkillSummary
from contract.tenancy import SKILL_TOOL
from orchestrator.approvals.policies import Rule


class ActiveSkills:
    """Of one run. `skills`: those that there are for its tenant."""

    def __init__(self, skills: Iterable[SkillSummary]) -> None:
        self._skills: Mapping[str, SkillSummary] = {skill.name: skill for skill in skills}
        self._loaded: set[str] = set()

    def note(self, call: ToolCall, result: ToolResult) -> str | None:
        """The skill that the call has used, if it has used one."""
        name = call.arguments.get("name") if call.name == SKILL_TOOL else call.name
        if not result.success or not isinstance(name, str) or name not in self._skills:
            return None
        # By its content: what else has the name says nothing of what this one may do.
        if call.name == SKILL_TOOL and result.metadata.get("digest") == self._skills[name].digest:
            self._loaded.add(name)
        return name

    def rules(self, trusted: Collection[str], tenant: str) -> tuple[Rule, ...]:
        """What need not be asked about now. `trusted`: digests."""
        active = [self._skills[name] for name in sorted(self._loaded) if self._skills[name].digest in trusted]
        return tuple(
            Rule("allow", allowed.tool, tenant, allowed.argv_prefix)
            for skill in active
            for allowed in skill.allowed_tools
        )
