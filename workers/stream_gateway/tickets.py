"""The check of tickets, without a request to Redis."""

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.json_limits import has_more_values, is_deeper
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_protocol import MAX_JSON_BYTES, FrameKind, StreamFrame
from toolcrew.contract.stream_tickets import (
    TICKET_S,
    StreamTicket,
    find_request_permission,
    find_stream_permission,
    open_ticket,
)
from toolcrew.workers.stream_gateway.relays import StreamViolation

MAX_DEPTH, MAX_VALUES = 16, 1000
MAX_NONCES = 200_000
"""Nonces that are stored. Above this number no ticket is accepted until some have expired."""
_SKEW_S = 5.0


@dataclass(frozen=True)
class StreamRequest:
    """An accepted request of a client. `payload`: for the stream server."""

    ticket: StreamTicket
    payload: bytes


class TicketGate:
    """Accepts the tickets for one gateway. `clock`: the shared clock."""

    def __init__(self, keys: SigningKeys, gateway: str, queue: str, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._gateway = gateway
        self._queue = queue
        self._clock = clock
        self._nonces: set[str] = set()
        self._expiries: deque[tuple[float, str]] = deque()

    def admit(self, frame: StreamFrame) -> StreamRequest:
        """Check OPEN or CALL of a client. Raises StreamViolation when it is not valid JSON, and ToolFailure when the
        stream is refused.
        """
        sealed, fields = _parse(frame)
        ticket = self._check(sealed)
        find = find_stream_permission if frame.kind is FrameKind.OPEN else find_request_permission
        permission = find(fields)
        if permission not in ticket.may:
            raise _refuse(f"it does not allow {permission}")
        return StreamRequest(ticket, _encode(fields))

    def _check(self, sealed: str) -> StreamTicket:
        try:
            ticket = open_ticket(self._keys, sealed)
        except EnvelopeRefused as error:
            raise _refuse(str(error)) from error
        if ticket.queue != self._queue or ticket.gateway != self._gateway:
            raise _refuse("it is for another gateway")
        now = self._clock()
        if not now < ticket.expires_at <= now + TICKET_S + _SKEW_S:
            raise _refuse("it has expired, or the clocks differ")
        self._use_nonce(ticket, now)
        return ticket

    def _use_nonce(self, ticket: StreamTicket, now: float) -> None:
        # In the order of their arrival. A nonce is stored for longer than any ticket is valid.
        while self._expiries and self._expiries[0][0] < now:
            self._nonces.discard(self._expiries.popleft()[1])
        if ticket.nonce in self._nonces:
            raise _refuse("it was used before")
        if len(self._nonces) >= MAX_NONCES:
            raise ToolFailure(ErrorCode.RATE_LIMITED, "the stream gateway gets too many requests: try again later")
        self._nonces.add(ticket.nonce)
        self._expiries.append((now + TICKET_S + 2 * _SKEW_S, ticket.nonce))


def _parse(frame: StreamFrame) -> tuple[str, dict[str, Any]]:
    """Return the ticket and the request. Raises StreamViolation, and ToolFailure for a request that is too deep."""
    try:
        fields = json.loads(frame.payload.decode(), parse_constant=_refuse_constant)
    except ValueError as error:
        raise StreamViolation(f"{frame.kind.name} is not JSON: {type(error).__name__}") from None
    except RecursionError:
        raise _too_complex() from None
    name = "open" if frame.kind is FrameKind.OPEN else "call"
    request = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(request, dict) or not isinstance(fields.get("ticket"), str) or len(fields) != 2:
        raise StreamViolation(f"{frame.kind.name} needs 'ticket' and '{name}'")
    if is_deeper(request, MAX_DEPTH) or has_more_values(request, MAX_VALUES):
        raise _too_complex()
    return fields["ticket"], request


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        payload = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # half of a surrogate pair, or a number that became infinite
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "the request has a text or a number that is invalid") from None
    if len(payload) > MAX_JSON_BYTES:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the request is longer than {MAX_JSON_BYTES} bytes")
    return payload


def _too_complex() -> ToolFailure:
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS, f"the request has more than {MAX_VALUES} values or {MAX_DEPTH} levels: shorten it"
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _refuse(reason: str) -> ToolFailure:
    return ToolFailure(ErrorCode.UNAUTHENTICATED, f"the ticket of this stream is refused: {reason}")
