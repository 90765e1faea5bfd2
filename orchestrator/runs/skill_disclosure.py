"""Which skills a model is told of in the description of skill_tool: all, while they fit into a budget; else those that
are used most.
"""

from collections.abc import Iterable, Mapping

from contract.specs import SkillSummary, ToolSpec
from contract.tenancy import SKILL_TOOL

MAX_CHARS = 8 * 1024
"""Of the tool's whole description: a model reads it at each step."""
WINDOW_SHARE = 0.02
"""Of a model's context window, where it is known."""
CHARS_A_TOKEN = 4
"""Of English text, about."""
_NONE = "There are no skills now."


def disclose(
    specs: Iterable[ToolSpec],
    skills: Iterable[SkillSummary],
    uses: Mapping[str, int],
    context_tokens: int | None = None,
) -> list[ToolSpec]:
    """The specs, skill_tool's with the skills' names and descriptions. `uses`: how often each was used;
    `context_tokens`: the model's window.
    """
    return [
        spec.model_copy(
            update={"description": f"{spec.description} {_tell(skills, uses, _room(spec, context_tokens))}"}
        )
        if spec.name == SKILL_TOOL
        else spec
        for spec in specs
    ]


def _room(spec: ToolSpec, context_tokens: int | None) -> int:
    most = MAX_CHARS - len(spec.description) - 1
    return most if context_tokens is None else min(most, int(context_tokens * WINDOW_SHARE * CHARS_A_TOKEN))


def _tell(skills: Iterable[SkillSummary], uses: Mapping[str, int], room: int) -> str:
    lines = {skill.name: f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills}
    if not lines:
        return _NONE
    told = _within(lines, uses, room)
    if len(told) == len(lines):
        return "\n".join(["Skills:", *told])
    left = len(lines) - len(told)
    return "\n".join(["Skills, those that are used most:", *told, f"[{left} more: action list names them]"])


def _within(lines: Mapping[str, str], uses: Mapping[str, int], room: int) -> list[str]:
    """Those that fit, in the order of their names; who is used least is left out first. One that is too long keeps no
    shorter one out.
    """
    fitting: set[str] = set()
    for name in sorted(lines, key=lambda name: (-uses.get(name, 0), name)):
        if len(lines[name]) + 1 <= room:
            room -= len(lines[name]) + 1
            fitting.add(name)
    return [lines[name] for name in lines if name in fitting]
