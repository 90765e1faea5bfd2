"""Converts every error of the API to a problem, and describes problems in the OpenAPI description."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import InvalidPart, explain_errors
from toolcrew.orchestrator.http.problems import (
    MEDIA_TYPE,
    ApiCode,
    ApiProblem,
    build_response,
    replace_surrogates,
    response_to,
)
from toolcrew.telemetry.logs import get_logger

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
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        # The response does not repeat the input, because the input may contain secrets and any data.
        parts = explain_errors(error.errors(), _find_body(request))
        is_unreadable = any(item["type"] == "json_invalid" for item in error.errors())
        sentence = str(parts[0]) if parts else "the request cannot be read"
        # FastAPI parses the body only if its type is JSON. Otherwise the body stays bytes.
        is_form = bool(parts) and isinstance(parts[0].value, bytes)
        advice = "Send it with Content-Type: application/json" if is_form else "See /openapi.json for the schema"
        return build_response(
            ApiCode.MALFORMED_REQUEST if is_unreadable else ErrorCode.INVALID_ARGUMENTS,
            f"{sentence}{'' if sentence.endswith('?') else '.'} {advice}",
            errors=[_describe(part) for part in parts],
            nearest=list(parts[0].nearest) if parts else [],
        )

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


def _find_body(request: Request) -> type[BaseModel] | None:
    """Return the class of the request's body, whose field names are compared with an unknown one."""
    route = request.scope.get("route")
    field = route.body_field if isinstance(route, APIRoute) else None
    kind = field.field_info.annotation if field is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _describe(part: InvalidPart) -> dict[str, Any]:
    loc = [replace_surrogates(str(step))[:100] for step in part.path]
    return {"loc": loc, "msg": replace_surrogates(part.reason)}


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
