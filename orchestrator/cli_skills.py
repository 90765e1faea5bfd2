"""`toolcrew skills`: which skills the workers have, and whether a folder is one."""

import json
from pathlib import Path
from typing import Annotated

import typer

from contract.errors import ConfigError
from contract.skills import SkillBroken
from contract.specs import SkillSummary
from orchestrator.cli_runner import EXIT_ERROR, Json, Tenant, fail, open_client, run_work
from orchestrator.skill_folders import examine_folder
from orchestrator.terminal import escape_controls, table_rows

skills_app = typer.Typer(no_args_is_help=True, help="What the workers have of skills.")


@skills_app.command("ls")
def skills_ls(tenant: Tenant = None, as_json: Json = False) -> None:
    """Every skill of the pool's workers."""

    async def work() -> tuple[SkillSummary, ...]:
        async with open_client(tenant) as client:
            return await client.skills()

    rows = [skill.model_dump(mode="json") for skill in run_work(work(), as_json)]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    short = [{**row, "description": str(row["description"])[:100], "scripts": "yes" if row["has_scripts"] else "no"} for row in rows]
    _print(table_rows(short, ("name", "files", "scripts", "description")))


@skills_app.command("show")
def skills_show(name: Annotated[str, typer.Argument(help="The skill.")], tenant: Tenant = None, as_json: Json = False) -> None:
    """One skill: what it is for, what its folder holds, and what is wrong with it."""

    async def work() -> SkillSummary:
        async with open_client(tenant) as client:
            return await client.skill(name)

    skill = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps(skill.model_dump(mode="json")))
        return
    facts = (("license", skill.license), ("compatibility", skill.compatibility), ("digest", skill.digest))
    size = f"{skill.files} files, {skill.bytes} bytes, {'with' if skill.has_scripts else 'without'} scripts"
    told = [f"{key}: {value}" for key, value in facts if value is not None]
    _print([skill.name, "", skill.description, "", size, *told, *(f"warning: {warning}" for warning in skill.warnings)])


@skills_app.command("validate")
def skills_validate(
    folder: Annotated[Path, typer.Argument(help="The skill's folder.")],
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Json = False,
) -> None:
    """Whether workers would load a folder as a skill, and what its author should mend. Needs no pool. Exit code 1 when they would not."""
    try:
        skill = examine_folder(folder)
    except (SkillBroken, ConfigError) as broken:
        fail(f"{folder}: {broken}", ConfigError.code.value, EXIT_ERROR, as_json)
    if as_json:
        typer.echo(json.dumps(skill.model_dump(mode="json")))
    else:
        _print(
            [
                *(f"warning: {warning}" for warning in skill.warnings),
                f"{skill.name} is a skill" + (f", with {len(skill.warnings)} warnings" if skill.warnings else ""),
            ]
        )
    raise typer.Exit(EXIT_ERROR if strict and skill.warnings else 0)


def _print(lines: list[str]) -> None:
    """What skills say is shown escaped: not every skill is ours."""
    for line in lines:
        typer.echo(escape_controls(line))
