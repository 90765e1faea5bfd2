"""`python -m workers.skills FOLDER_OR_ZIP`: the skill there as a worker would load it, as JSON, or what makes it none.

`--zip FILE` writes it as a .zip file, `--bundle FILE` as the bundle that is kept of installed skills. `--owner TENANT`: as it would be loaded for that one.
"""

import argparse
import json
import resource
import sys
from pathlib import Path

from contract.errors import ToolFailure
from contract.skills import SkillBroken
from workers.skills.archives import compress_bundle, load_zip, write_zip
from workers.skills.loader import Skill, load_skill

MEMORY_BYTES = 512 * 1024**2
"""What is examined may be hostile; a skill needs a few times its 64 MiB, and no disk."""


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    options = _parse()
    try:
        skill = (load_zip if options.path.is_file() else load_skill)(options.path, options.owner)
        if options.zip is not None:
            with open(options.zip, "wb") as target:
                write_zip(skill, target)
        if options.bundle is not None:
            options.bundle.write_bytes(compress_bundle(skill))
        told = _tell(skill)
    except (SkillBroken, ToolFailure) as broken:
        told = {"broken": str(broken)}
    except OSError as error:
        told = {"broken": f"{error.filename} cannot be read ({error.strerror})"}
    except MemoryError:
        told = {"broken": "to read it takes more memory than any skill needs"}
    sys.stdout.write(json.dumps(told))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=lambda text: Path(text).absolute())
    parser.add_argument("--zip", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--owner", default="")
    return parser.parse_args()


def _tell(skill: Skill) -> dict[str, object]:
    return {"skill": skill.summary.model_dump(mode="json"), "tool": skill.tool.spec.model_dump(mode="json") if skill.tool else None}


if __name__ == "__main__":
    sys.exit(main())
