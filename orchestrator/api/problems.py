"""Errors as clients get them: problem+json (RFC 9457) with a closed code, a sentence, and what to do next."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.routing import Route

from contract.errors import OPERATOR_CODES, BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from telemetry.logs import get_logger

log = get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_DETAIL_CHARS = 2000
RETRY_AFTER_S = 2
REDIS_AWAY = "the service's Redis does not answer, or does not do it: try again in a moment"


class ApiCode(StrEnum):
    """Codes of what goes wrong before a request reaches the pool; all others are an ErrorCode."""

    NOT_FOUND = "NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    MALFORMED_REQUEST = "MALFORMED_REQUEST"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"
    TOO_SLOW = "TOO_SLOW"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    CONFLICT = "CONFLICT"
    IDEMPOTENCY_MISMATCH = "IDEMPOTENCY_MISMATCH"
    IDEMPOTENCY_IN_PROGRESS = "IDEMPOTENCY_IN_PROGRESS"
    NOT_READY = "NOT_READY"


_API_STATUS: Mapping[ApiCode, int] = {
    ApiCode.NOT_FOUND: 404,
    ApiCode.METHOD_NOT_ALLOWED: 405,
    ApiCode.MALFORMED_REQUEST: 400,
    ApiCode.BODY_TOO_LARGE: 413,
    ApiCode.UNSUPPORTED_MEDIA_TYPE: 415,
    ApiCode.TOO_SLOW: 408,
    ApiCode.TOO_MANY_REQUESTS: 429,
    ApiCode.CONFLICT: 409,
    ApiCode.IDEMPOTENCY_MISMATCH: 422,
    ApiCode.IDEMPOTENCY_IN_PROGRESS: 409,
    ApiCode.NOT_READY: 503,
}
_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.SECURITY_REFUSED: 403,
    ErrorCode.PATH_NOT_ALLOWED: 403,
    ErrorCode.TOOL_NOT_FOUND: 404,
    ErrorCode.SESSION_NOT_FOUND: 404,
    ErrorCode.FILE_NOT_FOUND: 404,
    ErrorCode.UNKNOWN_TENANT: 404,
    ErrorCode.TOOL_DISABLED: 409,
    ErrorCode.FILE_EXISTS: 409,
    ErrorCode.CANCELLED: 409,
    ErrorCode.FILE_TOO_LARGE: 413,
    ErrorCode.NO_SPACE: 413,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.QUOTA_EXCEEDED: 429,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.INTERNAL: 500,
}
"""Of the others: what the infrastructure is to blame for is 503, all else a request that cannot be done as it is
(422).
"""


_SENTENCES: Mapping[int, str] = {
    400: "the body cannot be read: send JSON in UTF-8 that is not nested deeply",
    404: "there is nothing at this address: /openapi.json lists what there is",
    405: "this address does not take that method: see the header Allow",
}
"""Of what is refused before any code of ours sees it."""


class Problem(BaseModel):
    """What is wrong with a request. `code`: closed, for programs; `detail`: what happened and what to do next, for
    people.
    """

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    errors: list[dict[str, Any]] = Field(default_factory=list)
    """Of a request that cannot be read: which parts of it, as `loc` and `msg`."""
    nearest: list[str] = Field(default_factory=list)
    """Of a name that is none: those most like it."""


class ApiProblem(Exception):
    """Ends a request with this problem."""

    def __init__(self, code: ApiCode | ErrorCode, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})


def status_of(code: ApiCode | ErrorCode) -> int:
    if isinstance(code, ApiCode):
        return _API_STATUS[code]
    return _STATUS.get(code, 503 if code in OPERATOR_CODES else 422)


def build_response(
    code: ApiCode | ErrorCode,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    status: int | None = None,
    **fields: Any,
) -> Response:
    """The response to a request that failed."""
    status = status or status_of(code)
    shown = detail if len(detail) <= MAX_DETAIL_CHARS else detail[: MAX_DETAIL_CHARS - 3] + "..."
    problem = Problem(
        title=HTTPStatus(status).phrase, status=status, code=code.value, detail=_sendable(shown), **fields
    )
    told = dict(headers or {})
    if status == 401:
        told.setdefault("WWW-Authenticate", 'Bearer realm="toolcrew"')
    if status in (429, 503):
        told.setdefault("Retry-After", str(RETRY_AFTER_S))
    return JSONResponse(problem.model_dump(), status_code=status, media_type=MEDIA_TYPE, headers=told)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the description of a route: those problems, beside the ones that any route may end with."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    every = sorted({400, 401, 403, 404, 408, 413, 422, 429, 500, 503, *statuses})
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in every}


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Have every error of `app`, whose routes are of these routers, told as a problem."""

    @app.exception_handler(ApiProblem)
    @app.exception_handler(ToolFailure)
    @app.exception_handler(OperatorError)
    async def _expected(request: Request, error: ApiProblem | ToolFailure | OperatorError) -> Response:
        return response_to(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        # Without the input: it may hold secrets, and be anything.
        parts = [
            {"loc": [_sendable(str(part))[:100] for part in one["loc"]], "msg": _sendable(one["msg"])[:300]}
            for one in error.errors()[:20]
        ]
        is_unreadable = any(one["type"] == "json_invalid" for one in error.errors())
        first = parts[0] if parts else {"loc": [], "msg": "it cannot be read"}
        detail = f"{'.'.join(first['loc'])}: {first['msg']}; see /openapi.json for what is expected"
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
        # What it says may hold anything of anybody's: the log has it, the client has a word to find it by.
        log.error(
            "api_failed", method=request.method, path=request.url.path[:200], error=type(error).__name__, exc_info=error
        )
        return build_response(ErrorCode.INTERNAL, "this is a fault of the service, not of the request; its log has it")


def response_to(
    error: ApiProblem | ToolFailure | OperatorError, path: str, *, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to a request that ended with one of the errors that requests end with."""
    match error:
        case ApiProblem():
            return build_response(error.code, error.detail, headers={**error.headers, **(headers or {})})
        case ToolFailure():
            nearest = error.metadata.get("nearest")
            names = [str(name) for name in nearest] if isinstance(nearest, list) else []
            return build_response(error.code, error.message, headers=headers, nearest=names)
        case _:
            return build_response(error.code, tell(error, path), headers=headers)


def _methods_at(routers: Sequence[APIRouter], path: str) -> list[str]:
    """Of all routes of the address: each knows its own alone."""
    routes = [
        route
        for router in routers
        for route in router.routes
        if isinstance(route, Route) and route.path_regex.match(path)
    ]
    return sorted({method for route in routes for method in route.methods or ()})


def tell(error: OperatorError, path: str = "") -> str:
    """What a client is told of it. Where the service's Redis is, and what it says, is for the log."""
    if not isinstance(error, BrokerUnavailable):
        return str(error)
    log.warning("api_without_redis", path=path[:200], error=str(error))
    return REDIS_AWAY


def _sendable(text: str) -> str:
    """Without halves of surrogate pairs, which no JSON carries."""
    return text.encode("utf-8", "replace").decode()
