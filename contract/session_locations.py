"""Location of a session: which host runs the session, and the options that open the session on another host.

The docstring of store/sessions.py shows the states.
"""

from enum import StrEnum

from pydantic import Field, ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused, SandboxUnavailable
from toolcrew.contract.session_spec import DEFAULT_TTL_S, SessionSpec
from toolcrew.contract.signing import SigningKeys

MAX_FORKS = 100
"""Maximum number of new sessions of one fork."""
LOCATION_MARGIN_S = 3600
"""Seconds for which the location of a session is stored beyond the session's time to live."""


class LocationState(StrEnum):
    OPEN = "open"
    MOVING = "moving"
    """No host serves the session now: its host is being drained (emptied before a stop), or another host is opening the
    session. The next call opens the session.
    """


class SessionLocation(Record):
    """Fields of the hash, all stored as text in Redis. Times are Unix seconds; "" means that there is no checkpoint.

    `start`: the signed options of the session (seal_start). `checkpoint`: the last checkpoint, taken at
    `checkpoint_at`. `automatic`: the last checkpoint that a worker took on its own. The automatic checkpoint may be
    older than `checkpoint`, and is deleted after the next automatic checkpoint. `ttl_s`: seconds that the session
    lives without a call. `moving_until`: the time from which another process may open the session elsewhere. `held`:
    the value of `fence` when a drain of the host last stopped new calls of the session. While `held` equals `fence`,
    that host still has all files of the session. `folder`: the folder in which the session's last bash_tool call ended;
    "" before the first call. It is not signed.
    """

    state: LocationState
    queue: str
    fence: int = Field(ge=1)
    start: str = "{}"
    checkpoint: str = ""
    checkpoint_at: float = 0.0
    ttl_s: float = DEFAULT_TTL_S
    opened_at: float = 0.0
    moving_until: float = 0.0
    automatic: str = ""
    held: int = 0
    folder: str = ""


def seal_start(keys: SigningKeys, tenant: str, session: str, spec: SessionSpec) -> str:
    """Return the signed options that open the session on another host, without the source of its first files."""
    return keys.seal(f"start {tenant} {session}", spec.model_dump_json(exclude={"restore", "workspace", "fork"}))


def open_start(keys: SigningKeys, tenant: str, session: str, location: SessionLocation) -> SessionSpec:
    """Return the options that `seal_start` signed. Raises SandboxUnavailable when they are not signed for that session,
    or when this release cannot read them.
    """
    try:
        return SessionSpec.model_validate_json(keys.unseal(f"start {tenant} {session}", location.start))
    except EnvelopeRefused as error:
        raise SandboxUnavailable(
            f"the signature of the session's options is not valid, so the session is not opened again: open a new "
            f"session. {error}"
        ) from error
    except ValidationError:
        # `from None`: the original error quotes the options, which contain the configuration of tools.
        raise SandboxUnavailable(
            "another release wrote the session's options, which this release cannot read: run the same release "
            "everywhere, or open a new session"
        ) from None


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
    """Return the name of a checkpoint for people to read, even if its signature is invalid."""
    return sealed.rpartition(".")[2] or None
