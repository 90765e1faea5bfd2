"""Authentication and authorization of API requests: a bearer key identifies the caller and the tenant.

Invariant: a request without a valid key is rejected before its body is read.
"""

from collections import Counter
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.schema import MAX_NAME_CHARS, find_nearest
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.shares import EventStreams
from toolcrew.orchestrator.http.authentication import CLOSE, check_length, identify, read_bearer_key
from toolcrew.orchestrator.http.body_limits import find_header, refuse
from toolcrew.orchestrator.http.problems import ApiProblem, replace_surrogates, response_to
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.api_keys import ApiKeys, Credential, Identity
from toolcrew.store.audit import Audit, AuditAction, NewAuditEntry, build_entry
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.secrets import SecretStore
from toolcrew.store.tenants import RedisTenants


class ApiAuthentication:
    """Checks the key and the rate of each request that has a body. Sets the owner of the body: the tenant or key whose
    memory limit the body counts for (BodyLimits).

    Requests without a body are checked by the dependency of their route. Pages check their logins (PageRoute).
    """

    def __init__(self, app: ASGIApp, app_state: ApiState) -> None:
        self._app = app
        self._app_state = app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._check(scope)
            except (ApiProblem, ToolFailure, OperatorError) as error:
                await refuse(response_to(error, scope["path"], headers=CLOSE), receive, send)
                return
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        check_length(scope)
        has_body = find_header(scope, b"content-length") or find_header(scope, b"transfer-encoding")
        # The key is checked here, because FastAPI reads a declared body before the dependencies of a route run.
        if has_body and scope["path"].startswith("/v1/"):
            await identify(self._app_state, scope)


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a request, and the tenant of the request.

    The tenant is the tenant of the key, or the tenant that an operator names.
    """

    app_state: ApiState
    identity: Identity
    tenant: str
    credential: Credential

    @property
    def client(self) -> ToolClient:
        """Return a client of the pool for the tenant of the request."""
        return self.app_state.client(self.tenant, self.credential, key=self.identity.key_id)

    @property
    def tenants(self) -> RedisTenants:
        """Return the tenant registry. Changes are attributed to the caller."""
        return self.app_state.parts.pool.tenants.acting_as(self.identity.actor())

    @property
    def keys(self) -> ApiKeys:
        """Return the API keys. Changes are attributed to the caller."""
        return self.app_state.parts.keys.acting_as(self.identity.actor())

    @property
    def models(self) -> ModelEndpoints:
        """Return the model endpoints. Changes are attributed to the caller."""
        pool = self.app_state.parts.pool
        endpoints = ModelEndpoints(pool.redis, self.app_state.settings.deployment, pool.keys)
        return endpoints.acting_as(self.identity.actor())

    @property
    def secrets(self) -> SecretStore:
        """Return the secrets. Changes are attributed to the caller."""
        pool = self.app_state.parts.pool
        return SecretStore(pool.redis, self.app_state.settings.deployment, pool.keys).acting_as(self.identity.actor())

    @property
    def event_streams(self) -> EventStreams:
        """Return the counter of the event streams that the key has open in this process."""
        return self.app_state.event_streams.of(self.identity.key_id)

    async def record_foreign_action(self, action: AuditAction, target: str) -> None:
        """Before an operator's action on another tenant runs, write the action to the audit log."""
        if (entry := self.foreign_entry(action, target)) is not None:
            await Audit(self.app_state.parts.pool.redis, self.app_state.settings.deployment).add(entry)

    def foreign_entry(self, action: AuditAction, target: str) -> NewAuditEntry | None:
        """Return the audit entry for an operator's action on another tenant, or None for the caller's own tenant."""
        if self.tenant == self.identity.tenant:
            return None
        return build_entry(self.identity.actor(), action, target, tenant=self.tenant)

    @property
    def is_operator(self) -> bool:
        """Return whether the key has the role operator or admin."""
        return self.identity.role != "tenant"


def get_app_state(request: Request) -> ApiState:
    """Return the shared state of the process that serves the request."""
    app_state = request.app.state.app_state
    assert isinstance(app_state, ApiState)
    return app_state


async def depend_on_app_state(request: Request) -> ApiState:
    """Return the app state to a route.

    The function is async, although it awaits nothing. FastAPI runs a plain function in a thread, which takes longer
    than the rest of the authentication.
    """
    return get_app_state(request)


class _Callers(SecurityBase):
    """Dependency that returns the caller of a request, from the bearer key.

    It is a single dependency and not a chain of dependencies, because FastAPI needs more time to resolve a chain than
    the chain needs to run.
    """

    scheme_name = "HTTPBearer"
    model = HTTPBearer(description="An API key: `toolcrew keys create TENANT`.")

    async def __call__(
        self,
        request: Request,
        tenant: Annotated[
            str | None,
            Query(
                pattern=r"^[A-Za-z0-9_-]{1,64}$",
                description="The tenant, for operators' keys. Default: the tenant of the key.",
            ),
        ] = None,
    ) -> Caller:
        app_state = get_app_state(request)
        identity = await identify(app_state, request.scope)
        _refuse_unknown_parameters(request)
        credential = Credential(app_state.parts.keys, read_bearer_key(request.scope))
        return select_tenant(app_state, identity, credential, tenant)


def select_tenant(app_state: ApiState, identity: Identity, credential: Credential, tenant: str | None) -> Caller:
    """Return the caller of a request for a tenant; None: the tenant of the key. Raises ApiProblem when the key may not
    act for the tenant.
    """
    selected = tenant or identity.tenant
    if not identity.may_act_for(selected):
        raise ApiProblem(ErrorCode.PERMISSION_DENIED, f"the API key belongs to tenant {identity.tenant}: omit `tenant`")
    return Caller(app_state, identity, selected, credential)


def _refuse_unknown_parameters(request: Request) -> None:
    """Raise ToolFailure for a query parameter that the address does not have, with the nearest name, and for a
    parameter that is sent twice. An ignored parameter would change the meaning of the request: a loop over pages with a
    wrong name never ends.
    """
    if not request.scope["query_string"]:
        return
    known = _list_parameters(request.scope["route"].dependant)
    names = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in names.items():
        if name not in known:
            shown = replace_surrogates(name[:MAX_NAME_CHARS])
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"this address has no query parameter '{shown}': use {', '.join(sorted(known))}, or omit it",
                nearest=find_nearest(shown, sorted(known)),
            )
        if count > 1 and not known[name]:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the query parameter '{name}' was sent twice: send it once")


def _list_parameters(dependant: Dependant) -> dict[str, bool]:
    """Return the query parameters of a route: the name, and whether the parameter may be repeated."""
    found: dict[str, bool] = {}
    for inner in dependant.dependencies:
        found |= _list_parameters(inner)
    for field in dependant.query_params:
        kind = field.field_info.annotation
        # A parameter whose type is a model is a group of parameters, one for each field of the model.
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= {part.alias or name: _is_list(part.annotation) for name, part in kind.model_fields.items()}
        else:
            found[field.alias] = _is_list(kind)
    return found


def _is_list(annotation: Any) -> bool:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any(get_origin(kind) in (list, tuple, set, frozenset) for kind in kinds)


find_caller = _Callers()
AnyCaller = Annotated[Caller, Depends(find_caller)]


async def _operator(caller: AnyCaller) -> Caller:
    if caller.identity.role not in ("operator", "admin"):
        raise ApiProblem(
            ErrorCode.PERMISSION_DENIED, "this request needs an operator: use a key of the role operator or admin"
        )
    return caller


async def _admin(caller: AnyCaller) -> Caller:
    if caller.identity.role != "admin":
        raise ApiProblem(
            ErrorCode.PERMISSION_DENIED, "this request needs an administrator: use a key of the role admin"
        )
    return caller


OperatorCaller = Annotated[Caller, Depends(_operator)]
AdminCaller = Annotated[Caller, Depends(_admin)]
