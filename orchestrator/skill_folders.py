"""A skill's folder, examined for its author before any worker loads it: by what loads it there, as a program of its own."""

import json
import subprocess
import sys
from pathlib import Path

from contract.errors import ConfigError
from contract.skills import SkillBroken
from contract.specs import SkillSummary

EXAMINE_S = 120.0


def examine_folder(folder: Path) -> SkillSummary:
    """What workers would publish of it, with all warnings. Raises SkillBroken with what makes it unusable."""
    # -P: where the folder lies there may be anything, also a package of that name.
    command = [sys.executable, "-P", "-m", "workers.skills", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=EXAMINE_S)
        told = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        words = getattr(error, "stderr", b"") or b""
        raise ConfigError(f"{folder} could not be examined ({words.decode(errors='replace').strip()[-500:] or error})") from error
    if "broken" in told:
        raise SkillBroken(told["broken"])
    return SkillSummary.model_validate(told)
