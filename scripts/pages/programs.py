"""Build docs/programs.md from scripts/programs.toml: which programs work in sandboxes, and why others do not."""

from scripts.programs import USERS, Program, load_programs

PAGE = "programs.md"
INTRO = """\
# Programs

`scripts/programs` runs these programs of Debian 12 in sandboxes of the default class without network, as uid 1000 and as
[root inside](images.md#how-do-programs-become-root-inside). `scripts/reference.py` makes this page from `scripts/programs.toml`.

## Which programs do not work?

| program | as uid 1000 | as root inside |
|---|---|---|
"""


def build_page() -> str:
    programs = load_programs()
    rows = "".join(f"| {' | '.join((program.name, *_explain(program)))} |\n" for program in programs if program.fails)
    works = "".join(f"- {program.name}\n" for program in programs if not program.fails)
    return f"{INTRO}{rows}\n## Which programs work?\n\n{works}"


def _explain(program: Program) -> tuple[str, str]:
    plain, root = (program.fails.get(user, "works") for user in USERS)
    return plain, "the same" if root == plain else root
