"""`python -m workers.skills FOLDER`: the skill in a folder as a worker would load it, as JSON, or what makes it none."""

import json
import sys
from pathlib import Path

from contract.skills import SkillBroken
from workers.skills.loader import load_skill


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    try:
        told = load_skill(folder).summary.model_dump(mode="json")
    except SkillBroken as broken:
        told = {"broken": str(broken)}
    except OSError as error:
        told = {"broken": f"{error.filename} cannot be read ({error.strerror})"}
    sys.stdout.write(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
