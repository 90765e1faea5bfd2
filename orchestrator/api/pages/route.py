"""Common behavior of page routes: error pages, and headers that protect against other sites."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import explain_errors
from toolcrew.orchestrator.api.access import get_app_state
from toolcrew.orchestrator.api.pages.logins import NotLoggedIn, find_login
from toolcrew.orchestrator.api.pages.rendering import render_error
from toolcrew.orchestrator.http.authentication import name_body_owner
from toolcrew.orchestrator.http.body_limits import BODY_OWNER
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem, build_message, status_of

LOGIN_PATH = "/login"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action "
    "'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Other sites get no referrer. The value is not `no-referrer`, because browsers would then send `Origin: null` with
    # the forms of this site too, and the origin check would reject these forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageRoute(APIRoute):
    """Route that responds with HTML pages. An error is a page, too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if request.method == "POST" and request.url.path != LOGIN_PATH:
                    # Set the owner before the form is read, because the memory of the form counts for the limit of its
                    # owner.
                    request.scope[BODY_OWNER] = name_body_owner(
                        (await find_login(request, get_app_state(request))).identity
                    )
                response: Response = await handle(request)
            except NotLoggedIn:
                response = _to_login(request)
            except (ApiProblem, ToolFailure) as error:
                response = _render_error(error.code, str(error))
            except OperatorError as error:
                response = _render_error(error.code, build_message(error, request.url.path))
            except RequestValidationError as error:
                part = explain_errors(error.errors())[0]
                problem = str(replace(part, path=part.path[1:]))
                response = _render_error(ErrorCode.INVALID_ARGUMENTS, f"{problem}. Go back and correct it")
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answer


def is_fragment(request: Request) -> bool:
    """Return whether the script of an open page requests a part of the page."""
    return request.headers.get("x-fragment") == "1"


def _to_login(request: Request) -> Response:
    if is_fragment(request) or request.headers.get("accept") == "text/event-stream":
        return Response("log in again", status_code=401)
    if request.method != "GET":
        return RedirectResponse("/login", status_code=303)
    address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(
        "/login" if address == "/" else f"/login?next={quote(address[:1000], safe='')}", status_code=303
    )


def _render_error(code: ApiCode | ErrorCode, sentence: str) -> Response:
    return render_error(status_of(code), code.value, sentence)
