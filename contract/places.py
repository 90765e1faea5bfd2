"""Where a session lives: one hash in Redis a session, with a fence that grows at every move. What carries an older fence is refused.

::

    (none) --open--> open --its host is lost, or drains--> moving --reopened elsewhere--> open (fence + 1) --close--> closed
"""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from contract.calls import Record

DEFAULT_TTL_S, MAX_TTL_S = 1800.0, 86_400.0
"""Seconds without a call after which a session is closed: unless given otherwise, and at most."""
PLACE_MARGIN_S = 3600
"""How long a session's place is remembered beyond its time to live without a call."""
CLOSED = "closed"
"""The state of what is left of a closed session's place, which says so to every host that still has a sandbox of it, and is no place."""
CLOSED_MARGIN_S = 600
"""How long that is remembered beyond the time to live, after which such a sandbox has gone by itself."""


class PlaceState(StrEnum):
    OPEN = "open"
    MOVING = "moving"
    """It has no host now: parked by a drain, or being opened elsewhere. The next call opens it."""


class SessionPlace(Record):
    """The fields of the hash, all text in Redis. `start`: JSON of the arguments of `session.open`. `checkpoint`: the last one, "" for none,
    taken at `checkpoint_at`. `ttl_s`: how long it lives without a call; `moving_until`: when whoever opens it elsewhere is given up, Unix seconds.
    `automatic`: the last checkpoint that a worker took by itself, "" for none; it may be older than `checkpoint`, and is deleted when another was taken.
    `held`: the fence of the last hold by a drain; while it is the place's, whoever held it has all that the session has."""

    state: PlaceState
    queue: str
    fence: int = Field(ge=1)
    start: str = "{}"
    checkpoint: str = ""
    checkpoint_at: float = 0.0
    ttl_s: float = 1800.0
    opened_at: float = 0.0
    moving_until: float = 0.0
    automatic: str = ""
    held: int = 0


def parse_place(fields: Mapping[bytes, bytes]) -> SessionPlace | None:
    """The place of a hash; None for no hash, and for a session that was closed. Raises ValidationError for one that is none of ours."""
    if not fields or fields.get(b"state") == CLOSED.encode():
        return None
    return SessionPlace.model_validate({name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False)
