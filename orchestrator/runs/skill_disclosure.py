"""Skills of a run: how the model gets to know them, and which of them the run has loaded."""

from collections.abc import Collection, Iterable, Mapping

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL
from toolcrew.orchestrator.approvals.policies import Rule

MAX_CHARS = 8 * 1024
"""Limit of the complete description of skill_tool, in characters. The model reads the description at each step."""
WINDOW_SHARE = 0.02
"""Largest share of the model's context window, 0 to 1, that the description of skill_tool may use if the size of the
window is known.
"""
CHARS_A_TOKEN = 4
"""Approximate number of characters of English text in a token."""
_NONE = "There are no skills now."


def disclose(
    specs: Iterable[ToolSpec],
    skills: Iterable[SkillSummary],
    uses: Mapping[str, int],
    context_tokens: int | None = None,
) -> list[ToolSpec]:
    """Return the specs, with the names and descriptions of skills added to the description of skill_tool.

    `uses`: number of uses of each skill. `context_tokens`: the model's context window.
    """
    return [
        spec.model_copy(
            update={
                "description": f"{spec.description} {_list_skills(skills, uses, _count_chars(spec, context_tokens))}"
            }
        )
        if spec.name == SKILL_TOOL
        else spec
        for spec in specs
    ]


def _count_chars(spec: ToolSpec, context_tokens: int | None) -> int:
    """Return how many characters the list of skills may have."""
    max_chars = MAX_CHARS - len(spec.description) - 1
    return max_chars if context_tokens is None else min(max_chars, int(context_tokens * WINDOW_SHARE * CHARS_A_TOKEN))


def _list_skills(skills: Iterable[SkillSummary], uses: Mapping[str, int], max_chars: int) -> str:
    """Return the list of skills for the description, with a note about skills that do not fit."""
    lines = {skill.name: f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills}
    if not lines:
        return _NONE
    shown = _choose_lines(lines, uses, max_chars)
    if len(shown) == len(lines):
        return "\n".join(["Skills:", *shown])
    hidden = len(lines) - len(shown)
    return "\n".join(["Skills, those that are used most:", *shown, f"[{hidden} more: use action list to see them]"])


def _choose_lines(lines: Mapping[str, str], uses: Mapping[str, int], remaining_chars: int) -> list[str]:
    """Return the lines that fit, in the order of the input. The most used skills are chosen first. A line that is too
    long does not exclude shorter lines.
    """
    fitting: set[str] = set()
    for name in sorted(lines, key=lambda name: (-uses.get(name, 0), name)):
        if len(lines[name]) + 1 <= remaining_chars:
            remaining_chars -= len(lines[name]) + 1
            fitting.add(name)
    return [lines[name] for name in lines if name in fitting]


class ActiveSkills:
    """Skills that one run has loaded. `skills`: all skills of its tenant."""

    def __init__(self, skills: Iterable[SkillSummary]) -> None:
        self._skills: Mapping[str, SkillSummary] = {skill.name: skill for skill in skills}
        self._loaded: set[str] = set()

    def record_use(self, call: ToolCall, result: ToolResult) -> str | None:
        """Record the skill that the call has loaded. Return its name; None if the call has used no skill."""
        name = call.arguments.get("name") if call.name == SKILL_TOOL else call.name
        if not result.success or not isinstance(name, str) or name not in self._skills:
            return None
        # Compare the digest: another skill with the same name may allow other tools.
        if call.name == SKILL_TOOL and result.metadata.get("digest") == self._skills[name].digest:
            self._loaded.add(name)
        return name

    def rules(self, trusted: Collection[str], tenant: str) -> tuple[Rule, ...]:
        """Return rules that allow the tools of the loaded skills. `trusted`: digests of skills that may use their
        tools without an approval.
        """
        active = [self._skills[name] for name in sorted(self._loaded) if self._skills[name].digest in trusted]
        return tuple(
            Rule("allow", allowed.tool, tenant, allowed.argv_prefix)
            for skill in active
            for allowed in skill.allowed_tools
        )
