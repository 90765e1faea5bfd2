"""The Connect protocol with JSON, as E2B's clients speak it: one message, or a stream of messages.

A stream consists of envelopes: a byte of flags, four bytes with the size (big-endian), and JSON. The last envelope has
the flag END.
"""

import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.json_limits import is_deeper
from toolcrew.orchestrator.http.piece_responses import while_connected

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
MAX_DEPTH: Final = 16
_HEADER: Final = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
STREAM_TYPE: Final = "application/connect+json"
_STATUS: Final = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "failed_precondition": 400,
    "resource_exhausted": 429,
    "deadline_exceeded": 504,
    "unavailable": 503,
    "unknown": 500,
    "internal": 500,
}
_CODES: Final = {
    ErrorCode.INVALID_ARGUMENTS: "invalid_argument",
    ErrorCode.PATH_NOT_ALLOWED: "invalid_argument",
    ErrorCode.IS_DIRECTORY: "invalid_argument",
    ErrorCode.NOT_A_DIRECTORY: "invalid_argument",
    ErrorCode.OFFSET_OUT_OF_RANGE: "invalid_argument",
    ErrorCode.FILE_NOT_FOUND: "not_found",
    ErrorCode.SESSION_NOT_FOUND: "not_found",
    ErrorCode.FILE_EXISTS: "already_exists",
    ErrorCode.PERMISSION_DENIED: "permission_denied",
    ErrorCode.SECURITY_REFUSED: "permission_denied",
    ErrorCode.UNAUTHENTICATED: "unauthenticated",
    ErrorCode.RATE_LIMITED: "resource_exhausted",
    ErrorCode.QUOTA_EXCEEDED: "resource_exhausted",
    ErrorCode.BUDGET_EXCEEDED: "resource_exhausted",
    ErrorCode.FILE_TOO_LARGE: "resource_exhausted",
    ErrorCode.NO_SPACE: "resource_exhausted",
    ErrorCode.TIMEOUT: "deadline_exceeded",
    ErrorCode.SANDBOX_UNAVAILABLE: "unavailable",
    ErrorCode.BROKER_UNAVAILABLE: "unavailable",
    ErrorCode.BROKER_FULL: "unavailable",
    ErrorCode.HOST_LOST: "unavailable",
}


class ConnectError(Exception):
    """Error of a request. `code`: a code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @classmethod
    def of(cls, error: ToolFailure | OperatorError) -> "ConnectError":
        """Return the error with the code that is nearest to one of toolcrew."""
        return cls(_CODES.get(error.code, "internal"), str(error))

    def describe(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}

    def respond(self) -> Response:
        """Return the error as the answer of a request with one message."""
        return JSONResponse(self.describe(), _STATUS[self.code])


def parse_message(data: bytes) -> dict[str, Any]:
    """Return a message of a client. Raises ConnectError."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise ConnectError("invalid_argument", "the message is not JSON") from None
    if not isinstance(message, dict) or is_deeper(message, MAX_DEPTH):
        raise ConnectError("invalid_argument", f"the message is no object, or has more than {MAX_DEPTH} levels")
    return message


def encode_envelope(message: Mapping[str, Any], flags: int = 0) -> bytes:
    """Return a message as an envelope."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(flags, len(data)) + data


async def read_body(request: Request) -> bytes:
    """Return the body of a request. Raises ConnectError when it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_MESSAGE_BYTES:
            raise ConnectError("resource_exhausted", f"the request has more than {MAX_MESSAGE_BYTES} bytes")
    return bytes(body)


async def read_envelopes(request: Request) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a client's stream as they arrive. Raises ConnectError."""
    buffer = bytearray()
    async for piece in request.stream():
        buffer += piece
        while len(buffer) >= _HEADER.size:
            flags, size = _HEADER.unpack_from(buffer)
            if flags & _COMPRESSED or size > MAX_MESSAGE_BYTES:
                raise ConnectError("invalid_argument", "messages must not be compressed, and have at most 4 MiB")
            if len(buffer) < _HEADER.size + size:
                break
            data = bytes(memoryview(buffer)[_HEADER.size : _HEADER.size + size])
            del buffer[: _HEADER.size + size]
            if flags & _END:
                return
            yield parse_message(data)


async def read_one(request: Request) -> dict[str, Any]:
    """Return the one message with which a client begins a stream of answers. Raises ConnectError."""
    async for message in read_envelopes(request):
        return message
    raise ConnectError("invalid_argument", "the stream has no message")


SendMessage = Callable[[Mapping[str, Any]], Awaitable[None]]


class MessageStream(Response):
    """An answer of many messages. `produce` sends them, and ends when the client leaves.

    An error before or after the first message is a part of the stream, as E2B's clients expect.
    """

    def __init__(self, produce: Callable[[SendMessage], Coroutine[Any, Any, None]]) -> None:
        super().__init__(media_type=STREAM_TYPE)
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", STREAM_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def send_message(message: Mapping[str, Any]) -> None:
            await send({"type": "http.response.body", "body": encode_envelope(message), "more_body": True})

        end: dict[str, Any] = {}
        try:
            await while_connected(receive, self._produce(send_message))
        except ConnectError as error:
            end = {"error": error.describe()}
        except (ToolFailure, OperatorError) as error:
            end = {"error": ConnectError.of(error).describe()}
        except ClientDisconnect:
            return
        await send({"type": "http.response.body", "body": encode_envelope(end, _END), "more_body": False})


def build_stream_answer(message: Mapping[str, Any]) -> Response:
    """Return the answer of a client's stream: one message, and the end."""
    return Response(encode_envelope(message) + encode_envelope({}, _END), media_type=STREAM_TYPE)
