"""`python -m toolcrew.workers.skills FOLDER_OR_ZIP`: load the skill as a worker does; print a description of it,
or the fault, as JSON.

- `--zip FILE`: write the skill as a .zip file.
- `--bundle FILE`: write the bundle that is stored for installed skills.
- `--owner TENANT`: load the skill as for this tenant.
- `--tar`: the path is only a name; standard input is a tar archive of the skill's folder. The answer also lists the
  files with their positions in the archive.
- `--fronts`: standard input is a JSON object of SKILL.md texts by folder. The answer has their descriptions.
"""

import argparse
import contextlib
import json
import resource
import sys
from pathlib import Path

from toolcrew.contract.errors import ToolFailure
from toolcrew.contract.skills import SkillBroken, parse_skill
from toolcrew.contract.tar_archives import TarEntry
from toolcrew.workers.skills.archives import compress_bundle, find_files, load_tar, load_zip, write_zip
from toolcrew.workers.skills.loader import Skill, load_skill

MEMORY_BYTES = 512 * 1024**2
"""Memory limit of the process, because the input may be hostile. To load a skill (at most 64 MiB) needs a few times its
size.
"""
PROCESSOR_S = 30


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    options = _parse()
    try:
        if options.fronts:
            sys.stdout.write(json.dumps({"descriptions": _describe(json.load(sys.stdin))}))
            return 0
        files: dict[str, TarEntry] = {}
        if options.tar:
            data = sys.stdin.buffer.read()
            skill, files = load_tar(data, options.path.name, options.owner), find_files(data)
        else:
            skill = (load_zip if options.path.is_file() else load_skill)(options.path, options.owner)
        if options.zip is not None:
            with open(options.zip, "wb") as target:
                write_zip(skill, target)
        if options.bundle is not None:
            options.bundle.write_bytes(compress_bundle(skill))
        report = {
            **_report(skill),
            "files": [(path, file.offset, file.size, file.is_executable) for path, file in files.items()],
        }
    except (SkillBroken, ToolFailure) as broken:
        report = {"broken": str(broken)}
    except OSError as error:
        report = {"broken": f"{error.filename} cannot be read ({error.strerror})"}
    except MemoryError:
        report = {"broken": "reading it needs too much memory: make the skill smaller"}
    sys.stdout.write(json.dumps(report))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=lambda text: Path(text).absolute())
    parser.add_argument("--zip", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--owner", default="")
    parser.add_argument("--tar", action="store_true")
    parser.add_argument("--fronts", action="store_true")
    return parser.parse_args()


def _report(skill: Skill) -> dict[str, object]:
    tool = skill.tool
    return {
        "skill": skill.summary.model_dump(mode="json"),
        "tool": tool.spec.model_dump(mode="json") if tool else None,
        "sidecar": tool.sidecar.model_dump(mode="json") if tool else None,
        "body": skill.body,
    }


def _describe(fronts: dict[str, str]) -> dict[str, str]:
    descriptions = {}
    for folder, text in fronts.items():
        with contextlib.suppress(SkillBroken):
            descriptions[folder] = parse_skill(text, folder).description
    return descriptions


if __name__ == "__main__":
    sys.exit(main())
