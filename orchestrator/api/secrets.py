"""Secrets of a tenant over HTTP: set, list, revoke. No response contains a value."""

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from contract.clock import format_instant
from contract.errors import ConfigError
from contract.secrets import MAX_HOSTS, SecretInfo
from orchestrator.api.access import AnyCaller
from orchestrator.api.paging import Cursor, Limit, Page, page_of
from orchestrator.api.problem_handlers import responses
from orchestrator.http.problems import ApiCode, ApiProblem

router = APIRouter(prefix="/v1/secrets", tags=["secrets"], responses=responses())

Name = Annotated[str, Path(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]


class SecretView(BaseModel):
    """A secret without its value. `hosts`: hosts that sandboxes may send it to. `place`: where a request carries it.
    `state`: `valid`, or why it is not used. Times are in ISO 8601.
    """

    name: str
    hosts: list[str] = Field(default_factory=list)
    place: str = ""
    revision: int = 0
    created_at: str | None = None
    changed_at: str | None = None
    state: str


class NewSecret(BaseModel):
    """A value and where it may go. `hosts`: `NAME` or `NAME:PORT`; empty: no sandbox may use it. `place`:
    `header:NAME`, `query:NAME`, or `basic` for the password of basic authentication.
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


def view_secret(name: str, info: SecretInfo | ConfigError) -> SecretView:
    """Build the view of a secret for clients."""
    if isinstance(info, ConfigError):
        return SecretView(name=name, state=str(info))
    return SecretView(
        name=name,
        hosts=list(info.hosts),
        place=info.place,
        revision=info.revision,
        created_at=format_instant(info.created_at),
        changed_at=format_instant(info.changed_at),
        state="valid",
    )
