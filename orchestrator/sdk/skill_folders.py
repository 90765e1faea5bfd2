"""A skill's folder or .zip file, examined before any worker loads it: by what loads it there, as a program of its own,
within limits of its own.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from contract.errors import ConfigError
from contract.settings import parser_environment
from contract.skills import SkillBroken
from contract.specs import SkillSummary, ToolSpec
from orchestrator.settings import program

EXAMINE_S = 120.0


@dataclass(frozen=True)
class Examined:
    """What workers would publish of a skill, with all warnings. `tool`: what it is by its sidecar."""

    skill: SkillSummary
    tool: ToolSpec | None


def examine_skill(
    path: Path, *, owner: str = "", as_zip: Path | None = None, as_bundle: Path | None = None
) -> Examined:
    """`owner`: the tenant that it is to be installed for; "": it is to be everybody's. `as_zip`, `as_bundle`: where the
    skill is written to, as a .zip file or as what is kept of an installed one.

    Raises SkillBroken with what makes it unusable, ConfigError when it could not be examined.
    """
    command = [*program("workers.skills"), str(path), f"--owner={owner}"]
    for option, target in (("--zip", as_zip), ("--bundle", as_bundle)):
        command += [option, str(target)] if target is not None else []
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=EXAMINE_S, env=parser_environment())
        told = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        words = getattr(error, "stderr", b"") or b""
        raise ConfigError(
            f"{path} could not be examined ({words.decode(errors='replace').strip()[-500:] or error})"
        ) from error
    if "broken" in told:
        raise SkillBroken(told["broken"])
    tool = told["tool"]
    return Examined(
        SkillSummary.model_validate(told["skill"]), ToolSpec.model_validate(tool) if tool is not None else None
    )
