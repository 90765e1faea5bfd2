"""Model endpoints over HTTP: list, set, remove. No response contains an API key."""

from typing import Annotated

from fastapi import APIRouter, Path

from toolcrew.contract.access_views import Page
from toolcrew.contract.model_endpoints import EndpointView, ModelEndpoint
from toolcrew.orchestrator.api.access import AdminCaller, AnyCaller, Caller
from toolcrew.orchestrator.api.paging import Cursor, Limit, page_of
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem

router = APIRouter(prefix="/v1", tags=["models"], responses=responses())

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Tenant = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@router.get("/models")
async def list_models(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[EndpointView]:
    """List the model endpoints that the tenant's runs may use, without addresses. For an operator's key, the response
    also contains the addresses. If an operator sends no `tenant`, the response has the endpoints of the deployment and
    of all tenants.
    """
    if caller.is_operator and caller.tenant == caller.identity.tenant:
        return page_of(await caller.models.views(), cursor, limit)
    policy = await caller.tenants.policy(caller.tenant)
    views = await caller.models.views(caller.tenant, policy, shows_addresses=caller.is_operator)
    return page_of(views, cursor, limit)


@router.put("/models/{name}")
async def set_model(name: Name, body: ModelEndpoint, caller: AdminCaller) -> EndpointView:
    """Add or replace an endpoint of the deployment. The change takes effect everywhere within 2 seconds."""
    return await _set(caller, name, body, None)


@router.delete("/models/{name}", status_code=204, responses=responses(404))
async def remove_model(name: Name, caller: AdminCaller) -> None:
    """Remove an endpoint of the deployment. Runs that use the endpoint end at their next request."""
    await _remove(caller, name, None)


@router.put("/tenants/{tenant_name}/models/{name}", responses=responses(404))
async def set_tenant_model(tenant_name: Tenant, name: Name, body: ModelEndpoint, caller: AdminCaller) -> EndpointView:
    """Add or replace an endpoint of one tenant. Its `secret` is a secret of the tenant."""
    return await _set(caller, name, body, tenant_name)


@router.delete("/tenants/{tenant_name}/models/{name}", status_code=204, responses=responses(404))
async def remove_tenant_model(tenant_name: Tenant, name: Name, caller: AdminCaller) -> None:
    """Remove an endpoint of one tenant. Runs that use the endpoint end at their next request."""
    await _remove(caller, name, tenant_name)


async def _set(caller: Caller, name: str, endpoint: ModelEndpoint, tenant: str | None) -> EndpointView:
    await caller.models.set(name, endpoint, tenant)
    return EndpointView(name=name, tenant=tenant, **endpoint.model_dump())


async def _remove(caller: Caller, name: str, tenant: str | None) -> None:
    if not await caller.models.remove(name, tenant):
        raise ApiProblem(ApiCode.NOT_FOUND, f"there is no such model endpoint {name}: GET /v1/models lists them")
