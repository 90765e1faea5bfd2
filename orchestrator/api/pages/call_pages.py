"""The pages of calls: the list, and one call with its history in every process.

Tasks in Flower link to the page of a call, and the page links to Flower.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.api.pages.operating import DONE, back
from toolcrew.orchestrator.api.pages.people import FormSender, PageViewer, build_not_found
from toolcrew.orchestrator.api.pages.rendering import address, render
from toolcrew.orchestrator.api.pages.route import PageRoute, is_fragment
from toolcrew.orchestrator.api.pages.run_pages import has_page
from toolcrew.orchestrator.sdk.call_control import SHORT_LOOKUP_S, CallControl

router = APIRouter(route_class=PageRoute, include_in_schema=False)

MOST = 200
CallId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@router.get("/calls")
async def calls(request: Request, person: PageViewer, id: str = "", done: str = "") -> Response:
    """Show the calls that wait, run, or ended recently. With an id, redirect to the page of that call."""
    if id.strip():
        return RedirectResponse(
            address("calls", id.strip(), tenant=person.tenant if person.is_operator else None), status_code=303
        )
    viewer, parts = await person.viewer(), person.app_state.parts
    tenants = [viewer.tenant] if viewer.tenant else list(viewer.tenants)
    async with person.app_state.call_searches.enter(person.login.identity.key_id):
        page = await parts.pool.calls.read_page(tenants, MOST)
    template = "calls.part.html" if is_fragment(request) else "calls.html"
    return render(template, viewer, title="Calls", page="calls", calls=page, done=DONE.get(done))


@router.post("/calls/{call}/kill")
async def kill_call(call: CallId, person: FormSender) -> Response:
    """End a waiting or running call."""
    app_state = person.app_state
    try:
        await CallControl(app_state.parts.pool, app_state.settings.deployment).kill(
            person.owner, call, person.actor, lookup_s=SHORT_LOOKUP_S
        )
    except ToolFailure as failure:
        if failure.code is not ErrorCode.INVALID_ARGUMENTS:
            raise
        raise build_not_found("call") from failure
    return back("calls", call, of=person.owner, tenant=person.tenant)


@router.get("/calls/{call}")
async def one_call(call: str, person: PageViewer, of: str = "") -> Response:
    """Show what every process recorded about a call. `call`: the id of the call or of its Celery task."""
    # Operators can find a call without knowing its tenant: None searches all tenants.
    tenant = of or person.tenant
    try:
        async with person.app_state.call_searches.enter(person.login.identity.key_id):
            state = await person.app_state.parts.pool.calls.find(call, tenant)
    except ToolFailure as failure:
        if failure.code is not ErrorCode.INVALID_ARGUMENTS:
            raise
        raise build_not_found("call") from failure
    if not person.login.identity.may_act_for(state.tenant):
        raise build_not_found("call")
    has_run_page = await has_page(person, state.tenant, state.run)
    return render(
        "call.html",
        await person.viewer(),
        title=f"Call {state.id}",
        page="calls",
        call=state if person.is_operator else state.model_copy(update={"flower_url": None}),
        fields=state.model_dump(mode="json"),
        has_run_page=has_run_page,
    )
