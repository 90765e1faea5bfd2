"""The location of a session: on which host it lives, and how it is opened on another one. store/sessions.py draws its
states.
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
"""Seconds without a call after which a session is closed: the default, and the maximum."""
LOCATION_MARGIN_S = 3600
"""How long a session's location outlives its time to live without a call."""


class LocationState(StrEnum):
    OPEN = "open"
    MOVING = "moving"
    """It has no host now: a drain holds or has released it, or it is being opened elsewhere. The next call opens it."""


class SessionLocation(Record):
    """The fields of the hash, all text in Redis. Instants in Unix seconds; "" for no checkpoint.

    `start`: the signed arguments of `session.open` (seal_start). `checkpoint`: the last one, taken at `checkpoint_at`.
    `automatic`: the last one that a worker took by itself; it may be older than `checkpoint`, and is deleted after the
    next one. `ttl_s`: how long the session lives without a call. `moving_until`: from then on another process may open
    the session elsewhere. `held`: the fence of the last hold by a drain; while it equals `fence`, the host that held
    the session has all its files."""

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
    """Return the signed arguments with which the session is opened on another host: its image, its network, its
    sizes.
    """
    return keys.seal(f"start {tenant} {session}", json.dumps(arguments))


def open_start(keys: SigningKeys, tenant: str, session: str, location: SessionLocation) -> dict[str, Any]:
    """Return these arguments. Raises SandboxUnavailable when they are not signed for that session."""
    try:
        return dict(json.loads(keys.unseal(f"start {tenant} {session}", location.start)))
    except EnvelopeRefused as error:
        raise SandboxUnavailable(
            f"how the session was opened cannot be verified, so it is not opened again: open a new one. {error}"
        ) from error


def seal_checkpoint(keys: SigningKeys, tenant: str, session: str, checkpoint: str) -> str:
    """Return the signed name of a checkpoint of the session: its host deletes it, and another host restores it."""
    return keys.seal(f"checkpoint {tenant} {session}", checkpoint)


def open_checkpoint(keys: SigningKeys, tenant: str, session: str, sealed: str) -> str:
    """Return the name of the checkpoint; "" if there is none, or if it is not signed for that session."""
    try:
        return keys.unseal(f"checkpoint {tenant} {session}", sealed)
    except EnvelopeRefused:
        return ""


def show_checkpoint(sealed: str) -> str | None:
    """Return the name of a checkpoint for people to read, whether its signature holds or not."""
    return sealed.rpartition(".")[2] or None
