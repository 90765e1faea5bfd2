"""Login, logout, and the static files of the pages."""

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import RedirectResponse

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.api.access import depend_on_app_state
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.pages.logins import cookie_name, is_secure, logins_of
from toolcrew.orchestrator.api.pages.people import FormSender, build_not_found, check_origin
from toolcrew.orchestrator.api.pages.rendering import render, static_files
from toolcrew.orchestrator.api.pages.route import PageRoute
from toolcrew.orchestrator.http.authentication import MAX_KEY_CHARS
from toolcrew.store.api_keys import LOGIN_S
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_IMMUTABLE = {"Cache-Control": "public, max-age=31536000, immutable"}


@router.get("/static/{name}")
async def static_file(name: str) -> Response:
    """Return a style sheet, script or picture. Its address changes with its content, so browsers may cache it for a
    year.
    """
    file = static_files().get(name)
    if file is None:
        raise build_not_found("file")
    return Response(file, media_type=_TYPES[name.rpartition(".")[2]], headers=_IMMUTABLE)


@router.get("/favicon.ico")
async def icon() -> Response:
    """Return the icon at the address that browsers request by default."""
    return await static_file("icon.svg")


@router.get("/login")
async def login_page(next: str = "/") -> Response:
    """Show the login page."""
    return render("login.html", None, title="Log in", page="", problem="", next=_local(next))


@router.post("/login")
async def log_in(
    request: Request,
    app_state: Annotated[ApiState, Depends(depend_on_app_state)],
    key: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",
) -> Response:
    """Log a person in with an API key. The key is verified once and not stored."""
    check_origin(request, app_state.settings)
    name = cookie_name(app_state.settings)
    try:
        identity = await app_state.parts.keys.authenticate(key.strip()[:MAX_KEY_CHARS])
    except ToolFailure as error:
        if error.code is not ErrorCode.UNAUTHENTICATED:
            raise
        # Only failed logins count towards the rate limit of an address. Behind a proxy all clients share one address,
        # and a valid key must work even when other clients try many keys.
        app_state.rates.take(f"login {request.client.host if request.client else ''}")
        problem = "This key is not valid. Check that you copied the complete key, or ask an operator for a new one."
        return render("login.html", None, status=401, title="Log in", page="", problem=problem, next=_local(next))
    app_state.rates.take(identity.key_id)
    token = await logins_of(app_state).open(identity.key_id)
    # A new login gets a new token. The previous login ends, so that a token that was copied earlier stops working.
    before = request.cookies.get(name)
    if before:
        await logins_of(app_state).close(before)
    response = RedirectResponse(_local(next), status_code=303)
    response.set_cookie(
        name, token, max_age=LOGIN_S, path="/", secure=is_secure(app_state.settings), httponly=True, samesite="strict"
    )
    return response


@router.post("/logout")
async def log_out(request: Request, person: FormSender) -> Response:
    """Log a person out, in this and every other window of the login."""
    name = cookie_name(person.app_state.settings)
    await logins_of(person.app_state).close(request.cookies.get(name, ""))
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(
        name, path="/", secure=is_secure(person.app_state.settings), httponly=True, samesite="strict"
    )
    return response


def _local(address: str) -> str:
    """Return the address if it is a path of this site, otherwise "/".

    Browsers read `//host` and backslashes as another site. Without this check the login page could redirect to an
    attacker's site.
    """
    is_ours = address.startswith("/") and not address.startswith("//") and address.isascii() and address.isprintable()
    return address if is_ours and "\\" not in address else "/"
