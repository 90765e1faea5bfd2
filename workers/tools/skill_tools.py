"""Skills that are tools of their own name, by their sidecars."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import structlog

from contract.names import BUILTIN_TOOLS
from workers.skills.loader import Skill
from workers.skills.runner import run_entrypoint
from workers.tools.base import Outcome, ToolEnvironment, WorkerRegistry, WorkerTool

log = structlog.get_logger(__name__)


def register_skill_tools(registry: WorkerRegistry, skills: Iterable[Skill]) -> None:
    """Those that have a sidecar. One that has the name of a tool of ours is told and left out: it stays a skill."""
    for skill in skills:
        if skill.tool is None:
            continue
        if skill.name in BUILTIN_TOOLS or registry.get(skill.name) is not None:
            log.error("skill_name_taken", skill=skill.name, folder=str(skill.source))
            continue
        registry.register(WorkerTool(skill.tool.spec, partial(_run, skill)))


def _run(skill: Skill, arguments: Mapping[str, Any], environment: ToolEnvironment) -> Outcome:
    assert skill.tool is not None
    return run_entrypoint(skill, skill.tool.sidecar, arguments, environment)
