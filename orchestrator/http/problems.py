"""Errors in HTTP responses: problem+json (RFC 9457) with a code from a fixed set, a sentence, and what to do next."""

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from toolcrew.contract.errors import (
    OPERATOR_CODES,
    BrokerFull,
    BrokerUnavailable,
    ErrorCode,
    OperatorError,
    ToolFailure,
)
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_DETAIL_CHARS = 2000
RETRY_AFTER_S = 2
REDIS_FULL = "the memory of the service's Redis is full: try again later; an operator must free memory or add some"
REDIS_AWAY = "Redis does not answer the service or refuses the command: try again in a moment"


class ApiCode(StrEnum):
    """Codes of errors that occur before a request reaches the pool. All other errors have a code of ErrorCode."""

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
    ErrorCode.SESSION_BUSY: 409,
    ErrorCode.CANCELLED: 409,
    ErrorCode.RESULT_EXPIRED: 410,
    ErrorCode.FILE_TOO_LARGE: 413,
    ErrorCode.NO_SPACE: 413,
    ErrorCode.OFFSET_OUT_OF_RANGE: 416,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.QUOTA_EXCEEDED: 429,
    ErrorCode.BUDGET_EXCEEDED: 429,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.INTERNAL: 500,
}
"""HTTP status of error codes.

Codes that are not listed have status 503 when the infrastructure is the cause, and otherwise 422.
"""


class Problem(BaseModel):
    """Error of a request. `code`: one of a fixed set of codes, for programs. `detail`: what happened and what to do
    next, for people.
    """

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    errors: list[dict[str, Any]] = Field(default_factory=list)
    """Invalid parts of a request that cannot be parsed, as `loc` and `msg`."""
    nearest: list[str] = Field(default_factory=list)
    """Names that are similar to a name that does not exist."""


class ApiProblem(Exception):
    """Ends a request with this problem as the response."""

    def __init__(self, code: ApiCode | ErrorCode, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})


def status_of(code: ApiCode | ErrorCode) -> int:
    """Return the HTTP status of an error code."""
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
    """Build the response to a failed request."""
    status = status or status_of(code)
    shown = detail if len(detail) <= MAX_DETAIL_CHARS else detail[: MAX_DETAIL_CHARS - 3] + "..."
    problem = Problem(
        title=HTTPStatus(status).phrase, status=status, code=code.value, detail=replace_surrogates(shown), **fields
    )
    all_headers = dict(headers or {})
    if status == 401:
        all_headers.setdefault("WWW-Authenticate", 'Bearer realm="toolcrew"')
    if status in (429, 503):
        all_headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return JSONResponse(problem.model_dump(), status_code=status, media_type=MEDIA_TYPE, headers=all_headers)


def response_to(
    error: ApiProblem | ToolFailure | OperatorError, path: str, *, headers: Mapping[str, str] | None = None
) -> Response:
    """Build the response for an expected error of a request."""
    match error:
        case ApiProblem():
            return build_response(error.code, error.detail, headers={**error.headers, **(headers or {})})
        case ToolFailure():
            nearest = error.metadata.get("nearest")
            names = [str(name) for name in nearest] if isinstance(nearest, list) else []
            if error.code is ErrorCode.BUDGET_EXCEEDED:
                headers = {"Retry-After": str(error.metadata["retry_after_s"]), **(headers or {})}
            return build_response(error.code, error.message, headers=headers, nearest=names)
        case _:
            return build_response(error.code, build_message(error, path), headers=headers)


def build_message(error: OperatorError, path: str = "") -> str:
    """Return the message of an error for clients.

    The address and the messages of Redis are written to the log only.
    """
    if not isinstance(error, BrokerUnavailable):
        return str(error)
    log.warning("api_without_redis", path=path[:200], error=str(error))
    return REDIS_FULL if isinstance(error, BrokerFull) else REDIS_AWAY


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON in UTF-8 cannot contain."""
    return text.encode("utf-8", "replace").decode()
