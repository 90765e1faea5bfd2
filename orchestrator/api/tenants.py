"""Tenants and their API keys over HTTP, for operators and administrators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.access_views import KeyView, Page
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.api.access import AdminCaller, Caller, OperatorCaller
from toolcrew.orchestrator.api.paging import Cursor, Limit, page_of
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.operations.views import view_key
from toolcrew.store.api_keys import Role
from toolcrew.store.hosts import check_tenant_class
from toolcrew.store.tools import check_tools

router = APIRouter(prefix="/v1/tenants", tags=["tenants"], responses=responses())

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class TenantView(BaseModel):
    """A tenant. `policy`: the limits of the tenant; null when the stored policy cannot be read.
    `problem`: the reason.
    """

    name: str
    policy: TenantPolicy | None
    problem: str = ""


class NewTenant(BaseModel):
    """A new tenant with its policy. Missing fields of the policy get their default values."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    policy: TenantPolicy = TenantPolicy()


class Pause(BaseModel):
    """A pause. `reason`: the text that callers of the tenant read during the pause."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=500)


class RemovedTenant(BaseModel):
    """A removed tenant. `keys`: number of API keys that were revoked."""

    keys: int


class NewKeyRequest(BaseModel):
    """A new API key. `ttl_s`: lifetime in seconds; null: valid until revoked."""

    model_config = ConfigDict(extra="forbid")

    role: Role = "tenant"
    name: str = Field(default="", max_length=128)
    ttl_s: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)


class CreatedKey(BaseModel):
    """A created API key. `key`: the key itself, which is shown only once."""

    id: str
    key: str
    info: KeyView


@router.get("")
async def list_tenants(caller: OperatorCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[TenantView]:
    """List the registered tenants and the default tenant.

    While no tenant is registered, every tenant name is served with the default policy.
    """
    policies = await caller.app_state.parts.pool.tenants.all()
    return page_of([_view(name, policy) for name, policy in policies.items()], cursor, limit)


@router.post("", status_code=201, responses=responses(409))
async def add_tenant(body: NewTenant, caller: AdminCaller) -> TenantView:
    """Register a tenant.

    After the first registration, only registered tenants and the default tenant are served.
    """
    await _check_policy(caller, body.name, body.policy)
    try:
        await caller.tenants.add(body.name, body.policy)
    except ToolFailure as failure:
        if body.name not in await caller.tenants.all():
            raise
        advice = f"change its policy with PUT /v1/tenants/{body.name}"
        raise ToolFailure(failure.code, f"tenant {body.name} already exists: {advice}") from failure
    return _view(body.name, body.policy)


@router.get("/{name}", responses=responses(404))
async def get_tenant(name: Name, caller: OperatorCaller) -> TenantView:
    """Return one tenant with its policy."""
    policies = await caller.app_state.parts.pool.tenants.all()
    if name not in policies:
        raise _build_unknown_error(name)
    return _view(name, policies[name])


@router.put("/{name}", responses=responses(404))
async def set_tenant(name: Name, policy: TenantPolicy, caller: AdminCaller) -> TenantView:
    """Replace the policy of a tenant. Missing fields get their default values."""
    await _check_policy(caller, name, policy)
    with _naming_addresses(name):
        await caller.tenants.replace(name, policy)
    return _view(name, policy)


@router.delete("/{name}", responses=responses(404))
async def remove_tenant(name: Name, caller: AdminCaller) -> RemovedTenant:
    """Remove a tenant and revoke its keys. Its open sessions expire.

    The name cannot be registered again, because data of the tenant may still be stored.
    """
    with _naming_addresses(name):
        return RemovedTenant(keys=await caller.tenants.remove(name))


@router.post("/{name}/pause", responses=responses(404))
async def pause_tenant(name: Name, body: Pause, caller: OperatorCaller) -> TenantView:
    """Pause a tenant: no call and no run starts, within 2 seconds. Running calls continue to their end."""
    with _naming_addresses(name):
        return _view(name, await caller.tenants.pause(name, body.reason))


@router.post("/{name}/resume", responses=responses(404))
async def resume_tenant(name: Name, caller: OperatorCaller) -> TenantView:
    """Resume a paused tenant."""
    with _naming_addresses(name):
        return _view(name, await caller.tenants.resume(name))


@router.get("/{name}/keys", responses=responses(404))
async def list_keys(name: Name, caller: AdminCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[KeyView]:
    """List the tenant's API keys, the oldest first."""
    keys = await caller.app_state.parts.keys.all()
    mine = [
        view_key(key_id, key) for key_id, key in keys.items() if not isinstance(key, ConfigError) and key.tenant == name
    ]
    return page_of(mine, cursor, limit)


@router.post("/{name}/keys", status_code=201, responses=responses(404))
async def add_key(name: Name, body: NewKeyRequest, caller: AdminCaller, response: Response) -> CreatedKey:
    """Create an API key. Only this response contains the key."""
    with _naming_addresses(name):
        created = await caller.keys.add(name, body.role, name=body.name, ttl_s=body.ttl_s)
    response.headers["Cache-Control"] = "no-store"
    return CreatedKey(id=created.id, key=created.text, info=view_key(created.id, created.record))


@router.delete("/{name}/keys/{key_id}", status_code=204, responses=responses(404))
async def revoke_key(name: Name, key_id: Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")], caller: AdminCaller) -> None:
    """Revoke an API key. All processes reject the key within 2 seconds."""
    key = (await caller.keys.all()).get(key_id)
    # The tenant of an unreadable key is unknown, so any tenant's address can revoke the key.
    is_here = key is not None and (isinstance(key, ConfigError) or key.tenant == name)
    if not is_here or not await caller.keys.revoke(key_id):
        raise ApiProblem(
            ApiCode.NOT_FOUND, f"tenant {name} has no API key {key_id}: GET /v1/tenants/{name}/keys lists them"
        )


@contextmanager
def _naming_addresses(name: str) -> Iterator[None]:
    """Context manager that replaces the advice for an unknown tenant, which names commands, by addresses."""
    try:
        yield
    except ToolFailure as failure:
        if failure.code is not ErrorCode.UNKNOWN_TENANT:
            raise
        raise _build_unknown_error(name) from failure


def _build_unknown_error(name: str) -> ToolFailure:
    message = f"tenant {name} does not exist: GET /v1/tenants lists the tenants, POST /v1/tenants registers one"
    return ToolFailure(ErrorCode.UNKNOWN_TENANT, message)


async def _check_policy(caller: Caller, name: str, policy: TenantPolicy) -> None:
    """Raise ToolFailure if a tool or the class of the policy does not exist."""
    client, deployment = caller.app_state.parts.pool.redis, caller.app_state.settings.deployment
    await check_tools(client, deployment, name, policy)
    await check_tenant_class(client, deployment, policy.sandbox.tenant_class)


def _view(name: str, policy: TenantPolicy | ConfigError) -> TenantView:
    if isinstance(policy, ConfigError):
        return TenantView(name=name, policy=None, problem=str(policy))
    return TenantView(name=name, policy=policy)
