"""The page of one call: its life through every process. Flower's tasks link here, and it links to Flower's."""

from dataclasses import replace

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from contract.errors import ErrorCode, ToolFailure
from orchestrator.api.pages.people import Looking, not_here
from orchestrator.api.pages.rendering import address, render
from orchestrator.api.pages.route import PageRoute
from orchestrator.api.pages.run_pages import has_page
from store.call_life import CallLives

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/calls")
async def find_call(person: Looking, id: str = "") -> Response:
    """To the page of the call of that id."""
    return RedirectResponse(
        address("calls", id.strip(), tenant=person.tenant if person.is_operator else None) if id.strip() else "/",
        status_code=303,
    )


@router.get("/calls/{call}")
async def one_call(call: str, person: Looking, of: str = "") -> Response:
    """What every process knows of a call; by its id, or that of its Celery task."""
    settings = person.app_state.settings
    lives = CallLives(
        person.app_state.parts.pool.redis, settings.deployment, settings.broker().signing_keys(), settings.flower_url
    )
    # Operators need not know whose it is.
    tenant = of or person.tenant
    try:
        async with person.app_state.looks.turn(person.login.identity.key_id):
            life = await lives.find(call, tenant)
    except ToolFailure as failure:
        if failure.code is not ErrorCode.INVALID_ARGUMENTS:
            raise
        raise not_here("call") from failure
    if not person.login.identity.may_act_for(life.tenant):
        raise not_here("call")
    has_run_page = await has_page(person, life.tenant, life.run)
    return render(
        "call.html",
        await person.viewer(),
        title=f"Call {life.call}",
        page="calls",
        life=life if person.is_operator else replace(life, flower_url=None),
        told=life.to_json(),
        has_run_page=has_run_page,
    )
