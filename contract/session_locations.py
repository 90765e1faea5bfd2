"""Where a session lives: one hash in Redis a session, with a fence that grows at every move. What carries an older fence is refused.

::

    (none) --open--> open --its host is lost, or drains--> moving --reopened elsewhere--> open (fence + 1) --close--> closed
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from contract.calls import Record
from contract.errors import EnvelopeRefused, SandboxUnavailable
from contract.signing import SigningKeys

DEFAULT_TTL_S, MAX_TTL_S = 1800.0, 86_400.0
"""Seconds without a call after which a session is closed: unless given otherwise, and at most."""
LOCATION_MARGIN_S = 3600
"""How long a session's place is remembered beyond its time to live without a call."""
CLOSED = "closed"
"""The state of what is left of a closed session's place, which says so to every host that still has a sandbox of it, and is no place."""
CLOSED_MARGIN_S = 600
"""How long that is remembered beyond the time to live, after which such a sandbox has gone by itself."""


class LocationState(StrEnum):
    OPEN = "open"
    MOVING = "moving"
    """It has no host now: parked by a drain, or being opened elsewhere. The next call opens it."""


class SessionLocation(Record):
    """The fields of the hash, all text in Redis. `start`: the signed arguments of `session.open` (seal_start). `checkpoint`: the last one, "" for none,
    taken at `checkpoint_at`. `ttl_s`: how long it lives without a call; `moving_until`: when whoever opens it elsewhere is given up, Unix seconds.
    `automatic`: the last checkpoint that a worker took by itself, "" for none; it may be older than `checkpoint`, and is deleted when another was taken.
    `held`: the fence of the last hold by a drain; while it is the place's, whoever held it has all that the session has."""

    state: LocationState
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


def seal_start(keys: SigningKeys, tenant: str, session: str, arguments: Mapping[str, Any]) -> str:
    """Return the signed arguments with which the session is opened on another host: its image, its network, its sizes."""
    return keys.seal(f"start {tenant} {session}", json.dumps(arguments))


def open_start(keys: SigningKeys, tenant: str, session: str, place: SessionLocation) -> dict[str, Any]:
    """Return these arguments. Raises SandboxUnavailable when they are not signed for that session."""
    try:
        return dict(json.loads(keys.unseal(f"start {tenant} {session}", place.start)))
    except EnvelopeRefused as error:
        raise SandboxUnavailable(
            f"how the session was opened cannot be verified, so it is not opened again: open a new one. {error}"
        ) from error


def parse_location(fields: Mapping[bytes, bytes]) -> SessionLocation | None:
    """The place of a hash; None for no hash, and for a session that was closed. Raises ValidationError for one that is none of ours."""
    if not fields or fields.get(b"state") == CLOSED.encode():
        return None
    return SessionLocation.model_validate({name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False)
