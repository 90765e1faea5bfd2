"""The person who requests a page, and protection against requests from other sites.

Invariant: a form is accepted only from a page of this site, with the form token of the same login.
"""

import hmac
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Form, Query, Request, Response
from starlette.requests import HTTPConnection

from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.api.access import depend_on_app_state
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.pages.logins import Login, find_login
from toolcrew.orchestrator.api.pages.rendering import Viewer, render
from toolcrew.orchestrator.api.shares import EventStreams
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.audit import Actor

MAX_CHOICE = 500
"""Limit of tenants in the selection list. Other tenants are reached by links."""

TenantName = Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{0,64}$")]


@dataclass(frozen=True)
class Person:
    """A person who is logged in.

    `tenant`: the tenant that the page shows; None: all tenants. `owner`: the tenant that owns the run, call or other
    object on the page.
    """

    app_state: ApiState
    login: Login
    tenant: str | None
    owner: str

    @property
    def client(self) -> ToolClient:
        """Return a client of the pool for the owner."""
        return self.app_state.client(self.owner, self.login.credential)

    @property
    def actor(self) -> Actor:
        return self.login.identity.actor()

    @property
    def is_operator(self) -> bool:
        return self.login.identity.role != "tenant"

    @property
    def is_admin(self) -> bool:
        return self.login.identity.role == "admin"

    @property
    def event_streams(self) -> EventStreams:
        """Return the counter of the event streams that the key has open in this process."""
        return self.app_state.event_streams.of(self.login.identity.key_id)

    async def viewer(self) -> Viewer:
        """Return the person's data for templates."""
        identity = self.login.identity
        tenants: tuple[str, ...] = ()
        if self.is_operator:
            _, names = await self.app_state.parts.pool.tenants.all_with_active()
            tenants = tuple(sorted({*names, *([self.tenant] if self.tenant else [])}))[:MAX_CHOICE]
        shown = self.tenant if self.is_operator else identity.tenant
        return Viewer(identity.name or f"key {identity.key_id}", identity.role, shown, self.login.form_token, tenants)

    async def render(self, template: str, **values: Any) -> Response:
        """Render a page whose length depends on stored data.

        The page is rendered in a thread of the tenant that owns the data, so that a long page delays no other tenant.
        Each key renders only a few pages at a time.
        """
        viewer = await self.viewer()
        async with self.app_state.pages.enter(self.login.identity.key_id):
            return await in_tenant_thread(self.owner, render, template, viewer, **values)

    def check_operator(self) -> None:
        """Raise ApiProblem for a key of the role tenant."""
        if not self.is_operator:
            raise ApiProblem(
                ErrorCode.PERMISSION_DENIED,
                "this page needs an operator: log in with a key of the role operator or admin",
            )


async def _find_viewer(
    request: Request,
    app_state: Annotated[ApiState, Depends(depend_on_app_state)],
    tenant: TenantName = "",
    of: TenantName = "",
) -> Person:
    login = await find_login(request, app_state)
    identity = login.identity
    app_state.rates.take(identity.key_id)
    if not identity.may_act_for(tenant or identity.tenant) or not identity.may_act_for(of or identity.tenant):
        raise ApiProblem(
            ErrorCode.PERMISSION_DENIED,
            f"your key belongs to tenant {identity.tenant}: omit the name of the other tenant",
        )
    return Person(
        app_state,
        login,
        (tenant or None) if identity.role != "tenant" else identity.tenant,
        of or tenant or identity.tenant,
    )


async def _check_sender(
    request: Request,
    person: Annotated[Person, Depends(_find_viewer)],
    form_token: Annotated[str, Form(max_length=64)] = "",
) -> Person:
    check_origin(request, person.app_state.settings)
    # Second protection next to the origin check: another site cannot read the token of this login.
    if not person.login.owns(form_token):
        raise ApiProblem(
            ErrorCode.PERMISSION_DENIED,
            "the form belongs to another login, or the login has ended: open the page again and send the form from "
            "there",
        )
    return person


def check_origin(request: HTTPConnection, settings: OrchestratorSettings) -> None:
    """Raise ApiProblem for a form or a WebSocket of another site in the browser, or one that names no origin.

    The check uses the headers Sec-Fetch-Site and Origin, which scripts of another site cannot set.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    # Behind a proxy the Host header may differ from the public address, so TOOLCREW_PAGE_URL also counts.
    ours = {request.headers.get("host", "")} | ({urlsplit(settings.page_url).netloc} if settings.page_url else set())
    is_ours = origin is not None and any(
        name and hmac.compare_digest(urlsplit(origin).netloc.encode(), name.encode()) for name in ours
    )
    if (
        (site is not None and site != "same-origin")
        or (origin is not None and not is_ours)
        or (site is None and origin is None)
    ):
        raise ApiProblem(
            ErrorCode.PERMISSION_DENIED,
            "the request does not come from a page of this service: open the page and send the form from there. "
            "Behind a proxy, set TOOLCREW_PAGE_URL to the address of the proxy",
        )


def build_not_found(kind: str) -> ApiProblem:
    """Return the problem for a missing object. Another tenant's object gives the same problem."""
    return ApiProblem(
        ApiCode.NOT_FOUND,
        f"this {kind} does not exist, has expired, or belongs to another tenant: go back to the list",
    )


PageViewer = Annotated[Person, Depends(_find_viewer)]
FormSender = Annotated[Person, Depends(_check_sender)]
