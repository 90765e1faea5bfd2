"""The pages for operating a deployment: tools, tenants, models, secrets, hosts, sessions, and the audit log."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Form, Path, Request, Response
from fastapi.responses import RedirectResponse

from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.contract.registry import Switch
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.api.pages.people import FormSender, PageViewer, Person, build_not_found
from toolcrew.orchestrator.api.pages.rendering import address, render
from toolcrew.orchestrator.api.pages.route import PageRoute, is_fragment
from toolcrew.orchestrator.http.problems import ApiProblem
from toolcrew.orchestrator.operations.drains import find_workers, order_drain
from toolcrew.orchestrator.operations.views import view_secret
from toolcrew.store.api_keys import ApiKeyRecord
from toolcrew.store.audit import ACTIONS, Audit
from toolcrew.store.hosts import HostStore
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.overview import OverviewReader, TenantSummary
from toolcrew.store.secrets import SecretStore
from toolcrew.store.session_list import SessionList

router = APIRouter(route_class=PageRoute, include_in_schema=False)

MAX_TENANTS = 200
PAGE = 50
DONE = {
    "enabled": "The tool is enabled. The change reaches every worker within 2 seconds.",
    "disabled": "The tool is disabled. The change reaches every worker within 2 seconds.",
    "paused": "The tenant is paused. Running calls continue to their end. No new call starts.",
    "resumed": "The tenant is resumed. Its calls start again within 2 seconds.",
    "drained": "The host takes no new sessions. Its sessions move to other hosts, then its worker stops.",
    "cancelled": "The cancellation has started. Running calls end within seconds.",
    "allowed": "Allowed. The call continues.",
    "denied": "Denied. The model reads the reason.",
    "stored": "The secret is stored. The change reaches every sandbox within 2 seconds.",
    "revoked": "The secret is revoked. It stops working within 2 seconds.",
}
"""Sentences that a page shows after a change, by the `done` value of its address.

The text never comes from the address, so that a link cannot put text on a page.
"""

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@dataclass(frozen=True)
class TenantRow:
    """A tenant on the page. `sessions`: number of its open sessions."""

    summary: TenantSummary
    sessions: int


@router.get("/tools")
async def tools(person: PageViewer, done: str = "") -> Response:
    """Show every tool, enabled or disabled, with its switches."""
    viewer, client = await person.viewer(), person.client
    try:
        states = await client.tool_states()
    except ConfigError:
        # No worker has published tools yet.
        states = []
    off_for: dict[str, dict[str, Switch]] = {}
    if person.is_operator and person.tenant is None:
        off_for = {state.name: await client.switched_tenants(state.name) for state in states}
    return render("tools.html", viewer, title="Tools", page="tools", tools=states, off_for=off_for, done=DONE.get(done))


@router.post("/tools/{name}")
async def switch_tool(
    name: str,
    person: FormSender,
    enabled: Annotated[str, Form(pattern="^(yes|no)$")],
    reason: Annotated[str, Form(max_length=1000)] = "",
) -> Response:
    """Enable or disable a tool, for all tenants or for the selected tenant."""
    person.check_operator()
    if enabled == "yes":
        await person.client.enable(name, tenant=person.tenant)
    else:
        await person.client.disable(name, reason=reason.strip() or None, by=person.actor.label(), tenant=person.tenant)
    return back("tools", tenant=person.tenant, done="enabled" if enabled == "yes" else "disabled")


@router.get("/tenants")
async def tenants(request: Request, person: PageViewer, done: str = "") -> Response:
    """Show the tenants with their limits and their running and waiting calls. A tenant's key shows only its own
    tenant.
    """
    parts, deployment = person.app_state.parts, person.app_state.settings.deployment
    viewer, overview = await person.viewer(), await OverviewReader(parts.pool.redis, deployment, parts.pool.keys).read()
    visible = [tenant for tenant in overview.tenants if viewer.tenant in (None, tenant.tenant)]
    shown = visible[:MAX_TENANTS]
    counts = await SessionList(parts.pool.redis, deployment, parts.pool.keys).counts(
        [tenant.tenant for tenant in shown]
    )
    rows = [TenantRow(tenant, counts[tenant.tenant]) for tenant in shown]
    values: dict[str, Any] = {
        "tenants": rows,
        "left": len(visible) - len(shown),
        "is_open": not any(row.is_registered for row in overview.tenants if row.tenant != DEFAULT_TENANT),
        "keys": await _key_counts(person),
        "done": DONE.get(done),
    }
    template = "tenants.part.html" if is_fragment(request) else "tenants.html"
    return render(template, viewer, title="Tenants", page="tenants", **values)


@router.post("/tenants/{name}/pause")
async def pause_tenant(name: Name, person: FormSender, reason: Annotated[str, Form(max_length=500)] = "") -> Response:
    """Pause a tenant."""
    person.check_operator()
    await person.app_state.parts.pool.tenants.acting_as(person.actor).pause(name, reason.strip())
    return back("tenants", tenant=person.tenant, done="paused")


@router.post("/tenants/{name}/resume")
async def resume_tenant(name: Name, person: FormSender) -> Response:
    """Resume a tenant."""
    person.check_operator()
    await person.app_state.parts.pool.tenants.acting_as(person.actor).resume(name)
    return back("tenants", tenant=person.tenant, done="resumed")


@router.get("/models")
async def models(request: Request, person: PageViewer) -> Response:
    """Show the model endpoints. A tenant's key shows those that the tenant may use."""
    parts, viewer = person.app_state.parts, await person.viewer()
    endpoints = ModelEndpoints(parts.pool.redis, person.app_state.settings.deployment, parts.pool.keys)
    policy = await parts.pool.tenants.policy(viewer.tenant) if viewer.tenant is not None else None
    views = await endpoints.views(viewer.tenant, policy, shows_addresses=person.is_operator)
    template = "models.part.html" if is_fragment(request) else "models.html"
    return render(template, viewer, title="Models", page="models", models=views)


@router.get("/secrets")
async def secrets(person: PageViewer, done: str = "") -> Response:
    """Show the secrets of a tenant, without their values."""
    found = await _secret_store(person).all(person.owner)
    rows = [view_secret(name, info) for name, info in found.items()]
    viewer = await person.viewer()
    values: dict[str, Any] = {"secrets": rows, "owner": person.owner, "done": DONE.get(done)}
    return render("secrets.html", viewer, title="Secrets", page="secrets", **values)


@router.post("/secrets")
async def set_secret(
    person: FormSender,
    name: Annotated[str, Form(max_length=64)],
    value: Annotated[str, Form(max_length=8192)],
    hosts: Annotated[str, Form(max_length=16_384)] = "",
    place: Annotated[str, Form(max_length=128)] = "header:Authorization",
) -> Response:
    """Store a secret of a tenant, or replace it. `hosts` are separated by commas or spaces."""
    names = tuple(hosts.replace(",", " ").split())
    await _secret_store(person).set(person.owner, name.strip(), value, hosts=names, place=place.strip())
    return back("secrets", of=person.owner, done="stored")


@router.post("/secrets/{name}/revoke")
async def revoke_secret(name: Name, person: FormSender) -> Response:
    """Revoke a secret of a tenant."""
    if not await _secret_store(person).revoke(person.owner, name):
        raise build_not_found("secret")
    return back("secrets", of=person.owner, done="revoked")


@router.get("/hosts")
async def hosts(request: Request, person: PageViewer, done: str = "") -> Response:
    """Show the live workers with their load, and the queues without a worker."""
    person.check_operator()
    parts = person.app_state.parts
    store = HostStore(parts.pool.redis, person.app_state.settings.deployment)
    reports = await store.read()
    waiting = await store.queued(sorted({queue for report in reports for queue in (report.queue, *report.pools)}))
    dead = await store.dead_queues()
    template = "hosts.part.html" if is_fragment(request) else "hosts.html"
    values: dict[str, Any] = {"hosts": reports, "waiting": waiting, "dead": dead, "done": DONE.get(done)}
    return render(template, await person.viewer(), title="Hosts", page="hosts", **values)


@router.post("/hosts/{host}/drain")
async def drain_host(host: str, person: FormSender, lossy: Annotated[str, Form()] = "") -> Response:
    """Drain a host."""
    person.check_operator()
    app_state = person.app_state
    store = HostStore(app_state.parts.pool.redis, app_state.settings.deployment)
    try:
        reports = [report for report in find_workers(await store.read(), host) if report.worker]
    except ConfigError as error:
        raise build_not_found("host") from error
    for report in reports:
        if report.kind == "sandbox" and report.store == "local" and lossy != "yes":
            raise ApiProblem(
                ErrorCode.INVALID_ARGUMENTS,
                f"the checkpoints of {report.host} are stored on it, so its sessions would lose their files: go "
                "back and select 'Lose these files' to drain it anyway",
            )
    keys = app_state.settings.broker().signing_keys()
    for report in reports:
        await order_drain(store, report, keys, lossy=lossy == "yes", actor=person.actor)
    return back("hosts", tenant=person.tenant, done="drained")


@router.get("/sessions")
async def sessions(person: PageViewer, cursor: str = "", done: str = "") -> Response:
    """Show the open sessions."""
    parts, viewer = person.app_state.parts, await person.viewer()
    page = await SessionList(parts.pool.redis, person.app_state.settings.deployment, parts.pool.keys).read(
        viewer.tenant, cursor or None, PAGE
    )
    values: dict[str, Any] = {"sessions": page.sessions, "cursor": page.cursor, "done": DONE.get(done)}
    return render("sessions.html", viewer, title="Sessions", page="sessions", **values)


@router.get("/audit")
async def audit(person: PageViewer, cursor: str = "", action: str = "") -> Response:
    """Show the audit log."""
    person.check_operator()
    selected = tuple(name for name in ACTIONS if name == action)
    log = Audit(person.app_state.parts.pool.redis, person.app_state.settings.deployment)
    page = await log.read(cursor or None, PAGE, tenant=person.tenant, actions=selected)
    values: dict[str, Any] = {
        "entries": page.entries,
        "cursor": page.cursor,
        "action": action if selected else "",
        "actions": ACTIONS,
    }
    return render("audit.html", await person.viewer(), title="Audit", page="audit", **values)


def back(*path: str, **query: str | None) -> Response:
    """Redirect from a form to the page that shows the change, so that reloading the page does not repeat the change."""
    return RedirectResponse(address(*path, **query), status_code=303)


def _secret_store(person: Person) -> SecretStore:
    parts = person.app_state.parts
    store = SecretStore(parts.pool.redis, person.app_state.settings.deployment, parts.pool.keys)
    return store.acting_as(person.actor)


async def _key_counts(person: Person) -> dict[str, int] | None:
    """Return the number of API keys by tenant, for administrators only."""
    if not person.is_admin:
        return None
    counts: dict[str, int] = {}
    for key in (await person.app_state.parts.keys.all()).values():
        if isinstance(key, ApiKeyRecord):
            counts[key.tenant] = counts.get(key.tenant, 0) + 1
    return counts
