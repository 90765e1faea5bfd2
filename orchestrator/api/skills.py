"""Skills over HTTP: list the skills of a tenant, and install and remove its own skills."""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request

from toolcrew.contract.access_views import Page, SkillView
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.skills import SkillBroken
from toolcrew.contract.specs import SkillSummary
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.paging import Cursor, Limit, page_of
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.dispatch.tenant_catalog import Offer
from toolcrew.orchestrator.sdk.skill_installer import SkillInstaller

router = APIRouter(prefix="/v1/skills", tags=["skills"], responses=responses())


@router.get("")
async def list_skills(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[SkillView]:
    """List the tenant's skills by name: first the skills installed for the tenant, then the skills of the workers."""
    offer = await caller.client.offer()
    return page_of([view_skill(skill, offer) for skill in offer.skills], cursor, limit)


@router.get("/{name}", responses=responses(404))
async def get_skill(name: str, caller: AnyCaller) -> SkillView:
    """Return one skill."""
    return view_skill(await caller.client.skill(name), await caller.client.offer())


@router.post(
    "",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def install_skill(
    caller: AnyCaller,
    request: Request,
    replace: Annotated[bool, Query(description="Replace the tenant's skill with the same name.")] = False,
) -> SkillView:
    """Install a skill for the tenant: its folder as a .zip file of at most 16 MiB. New runs can use the skill."""
    installer = await caller.client.own_skills()
    async with caller.app_state.files.enter(caller.identity.key_id):
        data = await request.body()
        async with caller.app_state.examining.enter(caller.tenant):
            with tempfile.TemporaryDirectory(prefix="toolcrew-skill-") as folder:
                packed = Path(folder) / "skill.zip"
                await asyncio.to_thread(packed.write_bytes, data)
                skill = await _install(installer, packed, replace=replace)
    return view_skill(skill, await caller.client.offer())


async def _install(installer: SkillInstaller, packed: Path, *, replace: bool) -> SkillSummary:
    try:
        return (await installer.install(packed, replace=replace)).skill
    except SkillBroken as broken:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the skill was not installed: {broken}") from None


@router.delete("/{name}", status_code=204, responses=responses(404))
async def remove_skill(name: str, caller: AnyCaller) -> None:
    """Remove a skill that was installed for the tenant. Running runs keep the skill."""
    if not await (await caller.client.own_skills()).remove(name):
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND,
            f"tenant {caller.tenant} has no skill {name[:100]} of its own: GET /v1/skills lists them",
        )


def view_skill(skill: SkillSummary, offer: Offer) -> SkillView:
    """Build the view of a skill for clients."""
    return SkillView.model_validate({**skill.model_dump(), **offer.describe(skill.name)})
