"""Secrets of a tenant over HTTP: set, list, revoke. No response contains a value."""

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from toolcrew.contract.access_views import Page
from toolcrew.contract.secrets import MAX_HOSTS
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.paging import Cursor, Limit, page_of
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.operations.views import SecretView, view_secret

router = APIRouter(prefix="/v1/secrets", tags=["secrets"], responses=responses())

Name = Annotated[str, Path(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]


class NewSecret(BaseModel):
    """A value, and the requests that may contain it. `hosts`: `NAME` or `NAME:PORT`; empty: no sandbox may use it.
    `place`: `header:NAME`, `query:NAME`, or `basic` for the password of basic authentication.
    """

    model_config = ConfigDict(extra="forbid")

    value: SecretStr
    hosts: list[str] = Field(default_factory=list, max_length=MAX_HOSTS)
    place: str = Field(default="header:Authorization", max_length=128)


@router.get("")
async def list_secrets(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[SecretView]:
    """List the tenant's secrets by name, without their values."""
    found = await caller.secrets.all(caller.tenant)
    return page_of([view_secret(name, info) for name, info in found.items()], cursor, limit)


@router.put("/{name}")
async def set_secret(name: Name, body: NewSecret, caller: AnyCaller) -> SecretView:
    """Store a secret of the tenant, or replace it. The change takes effect everywhere within 2 seconds."""
    info = await caller.secrets.set(
        caller.tenant, name, body.value.get_secret_value(), hosts=tuple(body.hosts), place=body.place
    )
    return view_secret(name, info)


@router.delete("/{name}", status_code=204, responses=responses(404))
async def revoke_secret(name: Name, caller: AnyCaller) -> None:
    """Revoke a secret. It stops working everywhere within 2 seconds."""
    if not await caller.secrets.revoke(caller.tenant, name):
        raise ApiProblem(ApiCode.NOT_FOUND, f"tenant {caller.tenant} has no secret {name}: GET /v1/secrets lists them")
