"""Parsing of what the stream server of a sandbox answers. Its text is untrusted."""

import json
from typing import Any

from toolcrew.contract.errors import (
    OPERATOR_CODES,
    ErrorCode,
    OperatorError,
    SandboxUnavailable,
    StreamLost,
    ToolFailure,
)
from toolcrew.contract.guest_protocol import GUEST_CODES
from toolcrew.contract.json_limits import has_more_values, is_deeper
from toolcrew.contract.stream_protocol import BY_GATEWAY, StreamFrame

_MAX_DEPTH, _MAX_VALUES = 16, 10_000
_MAX_MESSAGE_CHARS = 2000
_SANDBOX_CODES = frozenset({*GUEST_CODES.values(), ErrorCode.NETWORK_ERROR, ErrorCode.RATE_LIMITED})
"""Codes that a sandbox may give. With another one, it could make a client believe in a failure of the service."""


def parse_answer(frame: StreamFrame) -> dict[str, Any]:
    """Return the fields of OPENED, END or REPLY. Raises the error that they contain: ToolFailure, OperatorError."""
    try:
        fields = json.loads(frame.payload)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or is_deeper(fields, _MAX_DEPTH) or has_more_values(fields, _MAX_VALUES):
        raise SandboxUnavailable("the stream server of the sandbox sent an invalid answer: open another session")
    if "error" in fields:
        raise _build_error(fields["error"], is_of_gateway=frame.offset == BY_GATEWAY)
    return fields


def _build_error(error: object, *, is_of_gateway: bool) -> ToolFailure | OperatorError:
    fields = error if isinstance(error, dict) else {}
    message = str(fields.get("message", "failed"))[:_MAX_MESSAGE_CHARS]
    name = str(fields.get("code"))
    try:
        code = GUEST_CODES.get(name) or ErrorCode(name)
    except ValueError:
        code = ErrorCode.INTERNAL
    if not is_of_gateway and code not in _SANDBOX_CODES:
        code = ErrorCode.INTERNAL
    if code is ErrorCode.HOST_LOST:
        return StreamLost(message)
    if code is ErrorCode.SANDBOX_UNAVAILABLE:
        return SandboxUnavailable(message)
    if code not in OPERATOR_CODES:
        return ToolFailure(code, message)
    failure = OperatorError(message)
    failure.code = code
    return failure
