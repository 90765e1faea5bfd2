"""Converts every error of the API to a problem, and describes problems in the OpenAPI description."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from contract.errors import ErrorCode, OperatorError, ToolFailure
from orchestrator.http.problems import (
    MEDIA_TYPE,
    ApiCode,
    ApiProblem,
    build_response,
    replace_surrogates,
    response_to,
)
from telemetry.logs import get_logger

log = get_logger(__name__)

_SENTENCES: Mapping[int, str] = {
    400: "the body cannot be read: send JSON in UTF-8 without deep nesting",
    404: "no resource has this address: see /openapi.json for the addresses",
    405: "this address does not accept the method: see the header Allow",
}
"""Details of problems for requests that the framework rejects, by status."""


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a route's problems: `statuses`, and the statuses that every
    route can return.
    """
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    every = sorted({400, 401, 403, 404, 408, 413, 422, 429, 500, 503, *statuses})
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in every}


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Install handlers that convert every error of `app` to a problem. `routers`: the routers of `app`."""

    @app.exception_handler(ApiProblem)
    @app.exception_handler(ToolFailure)
    @app.exception_handler(OperatorError)
    async def _expected(request: Request, error: ApiProblem | ToolFailure | OperatorError) -> Response:
        return response_to(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        # The response does not repeat the input, because the input may contain secrets and any data.
        parts = [
            {
                "loc": [replace_surrogates(str(part))[:100] for part in item["loc"]],
                "msg": replace_surrogates(item["msg"])[:300],
            }
            for item in error.errors()[:20]
        ]
        is_unreadable = any(item["type"] == "json_invalid" for item in error.errors())
        first = parts[0] if parts else {"loc": [], "msg": "the request cannot be read"}
        detail = f"{'.'.join(first['loc'])}: {first['msg']}; see /openapi.json for the schema"
        code = ApiCode.MALFORMED_REQUEST if is_unreadable else ErrorCode.INVALID_ARGUMENTS
        return build_response(code, detail, errors=parts)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        codes = {404: ApiCode.NOT_FOUND, 405: ApiCode.METHOD_NOT_ALLOWED, 415: ApiCode.UNSUPPORTED_MEDIA_TYPE}
        code = codes.get(error.status_code, ApiCode.MALFORMED_REQUEST)
        detail = _SENTENCES.get(error.status_code, str(error.detail))
        methods = _methods_at(routers, request.url.path) if error.status_code == 405 else []
        headers = {"Allow": ", ".join(methods)} if methods else error.headers
        return build_response(code, detail, headers=headers, status=error.status_code)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        # The text of the error may contain data of other tenants, so it is written to the log and not sent to the
        # client.
        log.error(
            "api_failed", method=request.method, path=request.url.path[:200], error=type(error).__name__, exc_info=error
        )
        return build_response(
            ErrorCode.INTERNAL,
            "the service failed, and the request is not the cause: the log of the service contains the error",
        )


def _methods_at(routers: Sequence[APIRouter], path: str) -> list[str]:
    """Return the HTTP methods of all routes with that path, for the header `Allow`. A single route knows only its own
    methods.
    """
    routes = [
        route
        for router in routers
        for route in router.routes
        if isinstance(route, Route) and route.path_regex.match(path)
    ]
    return sorted({method for route in routes for method in route.methods or ()})
