"""What the WebSockets of both clients share: addresses, options, refusals, and the pauses between attempts."""

import json
import random
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import httpx

from toolcrew.contract.errors import OPERATOR_CODES, ErrorCode, ToolcrewError
from toolcrew.orchestrator.sdk.http.connection import CONNECT_S, build_error, build_failure, keepalive, parse_object

if TYPE_CHECKING:
    from websockets.http11 import Response

RETRY_S: Final = 60.0
"""Seconds without a connection after which a stream gives up."""
MAX_MESSAGE_BYTES: Final = 128 * 1024
"""Largest message of the service: an entry of a file in JSON."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_PASSING_STATUSES: Final = frozenset({429, 502, 503, 504})
_PASSING_CODES: Final = OPERATOR_CODES - {ErrorCode.CONFIG_MISSING}
_UNREACHABLE_MS: Final = 60_000


class SocketLost(Exception):
    """Raised when a WebSocket ended or could not be opened, and another attempt may succeed. `error`: what to raise
    when no attempt succeeds; None: the service does not answer.
    """

    def __init__(self, reason: str, error: ToolcrewError | None = None) -> None:
        super().__init__(reason)
        self.error = error


def socket_options(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a connection to a service whose address is `url`."""
    return {
        "additional_headers": {"Authorization": headers["Authorization"]},
        # The same certificate authorities as those of the requests.
        "ssl": httpx.create_ssl_context() if url.startswith("https:") else None,
        "compression": None,
        "max_size": MAX_MESSAGE_BYTES,
        "open_timeout": CONNECT_S,
        "close_timeout": 1.0,
        # A reader that is slow reads the answer to a ping late, and its connection lives: the kernel finds a lost one.
        "ping_timeout": None,
    }


def socket_url(url: str, path: str, params: Mapping[str, Any]) -> str:
    """Return the address of a WebSocket."""
    query = urlencode({name: _text(value) for name, value in params.items() if value is not None})
    return f"ws{url.rstrip('/').removeprefix('http')}{path}{'?' if query else ''}{query}"


def watch_connection(connection: socket.socket) -> None:
    """Let the kernel end a connection whose peer is lost."""
    for level, name, value in keepalive():
        connection.setsockopt(level, name, value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREACHABLE_MS)


def read_refusal(response: "Response", url: str) -> ToolcrewError | SocketLost:
    """Return the error of a refused WebSocket. A service that is busy or starts may accept the next attempt."""
    error = build_error(
        httpx.Response(response.status_code, content=bytes(response.body or b""), request=httpx.Request("GET", url))
    )
    return SocketLost(str(error), error) if response.status_code in _PASSING_STATUSES else error


def read_error(fields: Mapping[str, Any]) -> ToolcrewError | SocketLost:
    """Return the error that an event reports. After a failure of the infrastructure the next attempt may succeed."""
    name = str(fields.get("code") or "")
    error = build_failure(name, str(fields.get("detail") or name), nearest=fields.get("nearest") or [])
    is_passing = fields.get("status") in _PASSING_STATUSES or getattr(error, "code", None) in _PASSING_CODES
    return SocketLost(str(error), error) if is_passing else error


def read_event(message: str | bytes) -> dict[str, Any]:
    """Return the fields of an event. Raises what the event reports, and ApiUnavailable."""
    fields = parse_object(message.encode() if isinstance(message, str) else message)
    if fields.get("event") == "error":
        raise read_error(fields)
    return fields


class Attempts:
    """Counts the attempts to continue one stream or transfer."""

    def __init__(self) -> None:
        self._failed = 0
        self._lost_at: float | None = None

    def succeed(self) -> None:
        """Begin again: the connection was of use."""
        self._failed, self._lost_at = 0, None

    def pause(self, error: ToolcrewError) -> float:
        """Return the seconds until the next attempt. Raises the error of the last one after RETRY_S."""
        now = time.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > RETRY_S:
            raise error
        self._failed += 1
        return random.uniform(0.5, 1.0) * min(_FIRST_PAUSE_S * 2.0 ** min(self._failed, 10), _LONGEST_PAUSE_S)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
