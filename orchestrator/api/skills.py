"""Skills over HTTP: which there are."""

from fastapi import APIRouter
from pydantic import BaseModel

from contract.specs import SkillSummary
from orchestrator.api.access import AnyCaller
from orchestrator.api.paging import Cursor, Limit, Page, page_of
from orchestrator.api.problems import responses

router = APIRouter(prefix="/v1/skills", tags=["skills"], responses=responses())


class SkillView(BaseModel):
    """A skill that the workers have. `digest`: sha256 over its files; `bytes`: of all of them; `warnings`: what its author should mend."""

    name: str
    description: str
    license: str | None
    compatibility: str | None
    digest: str
    files: int
    bytes: int
    has_scripts: bool
    warnings: list[str]


@router.get("")
async def list_skills(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[SkillView]:
    """Every skill that the workers have, by name."""
    return page_of([view_skill(skill) for skill in await caller.client.skills()], cursor, limit)


@router.get("/{name}", responses=responses(404))
async def get_skill(name: str, caller: AnyCaller) -> SkillView:
    """One skill."""
    return view_skill(await caller.client.skill(name))


def view_skill(skill: SkillSummary) -> SkillView:
    """A skill as clients get it."""
    return SkillView.model_validate(skill.model_dump())
