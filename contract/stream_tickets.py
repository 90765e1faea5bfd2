"""Tickets: signed permissions to open one stream or to make one request in the sandbox of a session, at one gateway."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.signing import SigningKeys

TICKET_S: Final = 30.0
"""Seconds for which a ticket is valid."""
_PURPOSE: Final = "stream-ticket"
PROCESS: Final = "process"
READ_FILES: Final = "files:read"
WRITE_FILES: Final = "files:write"
_EGRESS_PORT: Final = 3128
_OF_STREAM: Final = {
    "process": PROCESS,
    "attach": PROCESS,
    "read": READ_FILES,
    "list": READ_FILES,
    "watch": READ_FILES,
    "write": WRITE_FILES,
}
_OF_REQUEST: Final = {
    "processes": PROCESS,
    "signal": PROCESS,
    "resize": PROCESS,
    "input": PROCESS,
    "close_stdin": PROCESS,
    "wait": PROCESS,
    "stat": READ_FILES,
    "make_folder": WRITE_FILES,
    "move": WRITE_FILES,
    "remove": WRITE_FILES,
    "set_metadata": WRITE_FILES,
}


class StreamTicket(Record):
    """A ticket. `gateway`: the id of the only gateway that accepts it. `fence`: the number of the session's opening.
    `actor`: the key or process that asked. `may`: what the stream may do: process, files:read, files:write or
    port:NUMBER. `expires_at`: Unix seconds by the clock of Redis. `nonce`: a gateway accepts each nonce once.
    """

    tenant: str
    session: str
    fence: int = Field(ge=1)
    queue: str
    gateway: str
    actor: str
    may: tuple[str, ...]
    expires_at: float
    nonce: str = Field(min_length=16, max_length=64)


def seal_ticket(keys: SigningKeys, ticket: StreamTicket) -> str:
    """Return the signed ticket."""
    return keys.seal(_PURPOSE, ticket.model_dump_json())


def open_ticket(keys: SigningKeys, sealed: str) -> StreamTicket:
    """Return a ticket after a check of its signature. The caller checks all other fields. Raises EnvelopeRefused."""
    try:
        return StreamTicket.model_validate_json(keys.unseal(_PURPOSE, sealed))
    except ValidationError:
        raise EnvelopeRefused("another release wrote this ticket: run the same release everywhere") from None


def find_stream_permission(opening: Mapping[str, Any]) -> str:
    """Return the permission that a stream needs. `opening`: the payload of OPEN. Raises
    ToolFailure(INVALID_ARGUMENTS).
    """
    what = opening.get("what")
    if what == "port":
        return f"port:{_check_port(opening.get('port'))}"
    return _find(_OF_STREAM, "what", what, ("port", *_OF_STREAM))


def find_request_permission(request: Mapping[str, Any]) -> str:
    """Return the permission that a request needs. `request`: the payload of CALL. Raises
    ToolFailure(INVALID_ARGUMENTS).
    """
    return _find(_OF_REQUEST, "op", request.get("op"), tuple(_OF_REQUEST))


def _find(permissions: Mapping[str, str], field: str, name: object, names: tuple[str, ...]) -> str:
    if not isinstance(name, str) or name not in permissions:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'{field}' must be one of {', '.join(names)}")
    return permissions[name]


def _check_port(port: object) -> int:
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65_535:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "'port' must be a number from 1 to 65535")
    if port == _EGRESS_PORT:
        raise ToolFailure(ErrorCode.PERMISSION_DENIED, f"port {port} belongs to the sandbox itself: use another port")
    return port
