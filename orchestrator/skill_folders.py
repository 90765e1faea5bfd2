"""A skill's folder, examined for its author before any worker loads it."""

import os
from collections.abc import Iterator
from pathlib import Path

from contract.skills import LEFT_OUT, MAX_SKILL_FILE_BYTES, SKILL_FILE, BundleFile, SkillBroken, SkillText, check_bundle, parse_skill


def examine_folder(folder: Path) -> tuple[SkillText, list[str]]:
    """What its SKILL.md says, and all warnings. Raises SkillBroken with what makes it unusable."""
    folder = folder.absolute()
    try:
        warnings = check_bundle(_files(folder))
        path = folder / SKILL_FILE
        if path.stat().st_size > MAX_SKILL_FILE_BYTES:
            raise SkillBroken(f"its {SKILL_FILE} is larger than {MAX_SKILL_FILE_BYTES} bytes: move text into files beside it")
        text = parse_skill(path.read_bytes().decode(), folder.name)
    except UnicodeDecodeError as error:
        raise SkillBroken(f"its {SKILL_FILE} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise SkillBroken(f"{error.filename} cannot be read ({error.strerror})") from error
    return text, [*text.warnings, *warnings]


def _files(folder: Path) -> Iterator[BundleFile]:
    root = folder.resolve()
    for parent, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted([*names, *links]):
            path = Path(parent, name)
            relative, leads_out = path.relative_to(folder).as_posix(), not path.resolve().is_relative_to(root)
            if leads_out:
                yield BundleFile(relative, 0, False, b"", leads_out=True)
            elif path.is_file():
                facts = path.stat()
                with path.open("rb") as file:
                    yield BundleFile(relative, facts.st_size, bool(facts.st_mode & 0o100), file.read(2))


def _raise(error: OSError) -> None:
    raise error
