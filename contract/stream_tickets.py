"""Tickets: signed permissions to open one stream or to make one request in the sandbox of a session, at one gateway."""

from typing import Final

from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused
from toolcrew.contract.signing import SigningKeys

TICKET_S: Final = 30.0
"""Seconds for which a ticket is valid."""
_PURPOSE: Final = "stream-ticket"


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
