"""Examine a skill's folder or .zip file before a worker loads it. The workers' own loader does this in a separate
process with limits.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.programs import program
from toolcrew.contract.settings import parser_environment
from toolcrew.contract.skills import SkillBroken
from toolcrew.contract.specs import SkillSummary, ToolSpec

EXAMINE_S = 120.0


@dataclass(frozen=True)
class ExaminedSkill:
    """Result of an examination: the skill as workers would publish it, with all warnings. `tool`: the tool that its
    sidecar file describes.
    """

    skill: SkillSummary
    tool: ToolSpec | None


def examine_skill(
    path: Path, *, owner: str = "", as_zip: Path | None = None, as_bundle: Path | None = None
) -> ExaminedSkill:
    """Examine a skill. `owner`: the tenant for which it is to be installed; "": all tenants. `as_zip`, `as_bundle`:
    target files for the skill as a .zip file, or as the bundle of an installed skill.

    Raises SkillBroken with the error that makes the skill unusable, ConfigError when it could not be examined.
    """
    command = [*program("toolcrew.workers.skills"), str(path), f"--owner={owner}"]
    for option, target in (("--zip", as_zip), ("--bundle", as_bundle)):
        command += [option, str(target)] if target is not None else []
    try:
        process = subprocess.run(command, capture_output=True, check=True, timeout=EXAMINE_S, env=parser_environment())
        report = json.loads(process.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        stderr = getattr(error, "stderr", b"") or b""
        raise ConfigError(
            f"{path} could not be checked ({stderr.decode(errors='replace').strip()[-500:] or error}): correct "
            f"the path or the skill"
        ) from error
    if "broken" in report:
        raise SkillBroken(report["broken"])
    tool = report["tool"]
    return ExaminedSkill(
        SkillSummary.model_validate(report["skill"]), ToolSpec.model_validate(tool) if tool is not None else None
    )
