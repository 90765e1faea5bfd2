"""`toolcrew skills`: which skills there are for a tenant, installing its own, and whether a folder is one."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.schema import find_nearest
from contract.settings import check_environment
from contract.skills import SkillBroken
from contract.specs import SkillSummary
from orchestrator.cli.runner import EXIT_ERROR, Json, Tenant, fail, open_client, run_work
from orchestrator.sdk.skill_folders import examine_skill
from orchestrator.terminal.commands import build_command
from orchestrator.terminal.output import escape_controls, table_rows
from store.skills import InstalledSkill

skills_app = typer.Typer(
    no_args_is_help=True, help="Skills: those that the workers have, and those that are installed for a tenant."
)
Source = Annotated[Path, typer.Argument(help="The skill's folder, or a .zip file of it.")]


@skills_app.command("ls")
def skills_ls(tenant: Tenant = None, as_json: Json = False) -> None:
    """Every skill that there is for the tenant: those that were installed for it, and those of the pool's workers."""

    async def work() -> list[dict[str, Any]]:
        async with open_client(tenant) as client:
            offer = await client.offer()
            return [{**skill.model_dump(mode="json"), **offer.describe(skill.name)} for skill in offer.skills]

    rows = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    short = [
        {**row, "description": str(row["description"])[:100], "scripts": "yes" if row["has_scripts"] else "no"}
        for row in rows
    ]
    _print(table_rows(short, ("name", "source", "tool", "files", "scripts", "description")))


@skills_app.command("show")
def skills_show(
    name: Annotated[str, typer.Argument(help="The skill.")], tenant: Tenant = None, as_json: Json = False
) -> None:
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


@skills_app.command("install")
def skills_install(
    source: Source,
    replace: Annotated[bool, typer.Option("--replace", help="In place of the tenant's skill of that name.")] = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Install a skill for a tenant: its runs have it from now on, in place of the workers' of that name. Nobody else
    has it.
    """

    async def work() -> InstalledSkill:
        async with open_client(tenant) as client:
            return await (await client.own_skills()).install(source, replace=replace)

    try:
        installed = run_work(work(), as_json)
    except SkillBroken as broken:
        fail(f"{source}: {broken}", ConfigError.code.value, EXIT_ERROR, as_json)
    if as_json:
        typer.echo(json.dumps(installed.model_dump(mode="json")))
        return
    skill = installed.skill
    _print(
        [
            *(f"warning: {warning}" for warning in skill.warnings),
            f"{skill.name} is installed ({skill.files} files, digest {skill.digest})",
        ]
    )


@skills_app.command("rm")
def skills_rm(
    name: Annotated[str, typer.Argument(help="A skill that was installed for the tenant.")],
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Remove a skill that was installed for a tenant. What runs with it goes on."""

    async def work() -> None:
        async with open_client(tenant) as client:
            desk = await client.own_skills()
            if not await desk.remove(name):
                raise ToolFailure(
                    ErrorCode.FILE_NOT_FOUND,
                    f"tenant {desk.tenant} has no skill {name[:100]} of its own: see "
                    f"`{build_command('skills', 'ls', tenant=desk.tenant)}`",
                    nearest=find_nearest(name, await desk.all()),
                )

    run_work(work(), as_json)
    _print([json.dumps({"name": name, "removed": True}) if as_json else f"{name} is removed"])


@skills_app.command("pack")
def skills_pack(
    source: Source,
    target: Annotated[
        Path | None, typer.Option("--output", "-o", help="The .zip file; else NAME.zip in the current folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a skill as a .zip file, the same bytes for the same files. Needs no pool."""
    with tempfile.TemporaryDirectory(prefix="toolcrew-skill-") as folder:
        made = Path(folder) / "skill.zip"
        skill = _examined(source, as_json, as_zip=made)
        chosen = target or Path(f"{skill.name}.zip")
        try:
            shutil.copyfile(made, chosen)
        except OSError as error:
            fail(f"{chosen} cannot be written ({error.strerror})", ConfigError.code.value, EXIT_ERROR, as_json)
    told = {"name": skill.name, "path": str(chosen), "bytes": chosen.stat().st_size, "digest": skill.digest}
    _print([json.dumps(told) if as_json else f"{skill.name} is packed into {chosen} ({told['bytes']} bytes)"])


@skills_app.command("validate")
def skills_validate(
    source: Source,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Json = False,
) -> None:
    """Whether it would be loaded as a skill, and what its author should mend. Needs no pool. Exit code 1 when it would
    not.
    """
    skill = _examined(source, as_json)
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


def _examined(source: Path, as_json: bool, *, as_zip: Path | None = None) -> SkillSummary:
    try:
        check_environment()
        return examine_skill(source, as_zip=as_zip).skill
    except (SkillBroken, ConfigError) as broken:
        fail(f"{source}: {broken}", ConfigError.code.value, EXIT_ERROR, as_json)


def _print(lines: list[str]) -> None:
    """What skills say is shown escaped: not every skill is ours."""
    for line in lines:
        typer.echo(escape_controls(line))
