"""`toolcrew skills`: list the skills of a tenant, and check, install and remove its own skills."""

from pathlib import Path
from typing import Annotated

import typer

from toolcrew.contract.access_views import SkillView
from toolcrew.contract.clock import with_instants
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.schema import find_nearest
from toolcrew.contract.settings import check_environment
from toolcrew.contract.skills import SkillBroken
from toolcrew.contract.specs import SkillSummary
from toolcrew.orchestrator.cli.clients import open_client, open_tenant_client
from toolcrew.orchestrator.cli.runner import Json, Output, Tenant, as_command, list_json, list_output
from toolcrew.orchestrator.sdk.skill_folders import examine_skill
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.store.skills import InstalledSkill
from toolcrew.store.tools import find_skill

skills_app = typer.Typer(no_args_is_help=True)
Source = Annotated[Path, typer.Argument(help="The folder of the skill, or a .zip file of it.")]


@skills_app.command("list")
@as_command
async def skills_list(
    name: Annotated[str | None, typer.Argument(help="Only this skill, with all fields.")] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """List the skills of a tenant, or show one skill.

    A tenant has the skills of the workers and the skills that were installed for it.
    """
    async with open_tenant_client(tenant) as client:
        skills = await client.skill_views()
    if name is not None:
        skills = [find_skill(name, skills)]
    rows = [skill.model_dump(mode="json") for skill in skills]
    if name is not None:
        return Output(list_json("skills", rows), _describe_skill(skills[0]))
    short = [
        {**row, "description": str(row["description"])[:100], "scripts": "yes" if row["has_scripts"] else "no"}
        for row in rows
    ]
    return list_output(list_json("skills", rows), short, ("name", "source", "tool", "files", "scripts", "description"))


def _describe_skill(skill: SkillView) -> list[str]:
    details = (("license", skill.license), ("compatibility", skill.compatibility), ("digest", skill.digest))
    scripts = "with scripts" if skill.has_scripts else "without scripts"
    size = f"{count(skill.files, 'file')}, {count(skill.bytes, 'byte')}, {scripts}"
    fields = [f"{key}: {value}" for key, value in details if value is not None]
    return [skill.name, "", skill.description, "", size, *fields, *_warn(skill)]


def _warn(skill: SkillSummary | SkillView) -> list[str]:
    return [f"warning: {warning}" for warning in skill.warnings]


@skills_app.command("install")
@as_command
async def skills_install(
    source: Source,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the tenant's skill of the same name.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the skill: install nothing, open no connection.")
    ] = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Install a skill for one tenant. It replaces the workers' skill of the same name.

    New runs of the tenant use the skill; no other tenant sees it. Exit code 1: the skill cannot be loaded.
    """
    try:
        if check:
            check_environment()
            stored: SkillSummary | InstalledSkill = (skill := examine_skill(source).skill)
            done = "is a valid skill"
        else:
            async with open_client(tenant) as client:
                stored = installed = await (await client.own_skills()).install(source, replace=replace)
            skill = installed.skill
            done = f"is installed ({count(skill.files, 'file')}, digest {skill.digest})"
    except SkillBroken as broken:
        raise ConfigError(f"{source}: {broken}") from broken
    return Output(with_instants(stored.model_dump(mode="json")), [*_warn(skill), f"{skill.name} {done}"])


@skills_app.command("remove")
@as_command
async def skills_remove(
    name: Annotated[str, typer.Argument(help="A skill that was installed for the tenant.")],
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Remove a skill that was installed for a tenant. Runs that use it continue."""
    async with open_client(tenant) as client:
        skills = await client.own_skills()
        if not await skills.remove(name):
            raise ToolFailure(
                ErrorCode.FILE_NOT_FOUND,
                f"tenant {skills.tenant} has no installed skill {name[:100]}: see "
                f"`{build_command('skills', 'list', tenant=skills.tenant)}`",
                nearest=find_nearest(name, await skills.all()),
            )
    return Output({"name": name, "removed": True}, [f"{name} is removed"])
