"""The states and the fields of a call's record in Redis. store/calls.py draws how the states follow each other."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from contract.calls import Record
from contract.errors import EnvelopeRefused
from contract.signing import SigningKeys

CALL_TTL_S = 24 * 3600
"""How long a call id is remembered, and so cannot be used again."""
RESULT_TTL_S = 3600
"""How long a result waits in Redis for whoever awaits it."""
MAX_ATTEMPTS = 3
"""How often a call that is lost is sent: again only when nothing can have acted, or its tool is idempotent."""


class CallState(StrEnum):
    """The state of a call. QUEUED and RUNNING: no process has given it an end. LOST: it may be sent again."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    UNKNOWN = "unknown"
    FORBIDDEN = "forbidden"

    @property
    def has_ended(self) -> bool:
        """Return True for a state in which the call neither waits nor runs."""
        return self not in (CallState.QUEUED, CallState.RUNNING)

    @property
    def is_lost(self) -> bool:
        """Return True for a state in which no worker will finish this attempt at the call."""
        return self in (CallState.LOST, CallState.UNKNOWN)


class CallClaim(StrEnum):
    """What a worker is told that wants to start a call."""

    GRANTED = "granted"
    STARTED = "started"
    """It has been started, or forbidden, before: this message is a repetition, and nobody waits for its answer."""
    SUPERSEDED = "superseded"
    """A later attempt of the same call is on its way."""
    MOVED = "moved"
    """Its session lives on another host by now, or was closed."""
    EXPIRED = "expired"
    """Its deadline had passed; it is forbidden by now."""


class CallRecord(Record):
    """The fields of the hash, all text in Redis; absent ones are not known. Instants in Unix seconds of the shared
    clock.

    `holder`: who runs it (contract/hosts.py: holder_name); `claim`: a word of the claim that started it, by which one
    that is sent again knows itself; `code`: the result's error code, "" when it succeeded; `nonce`: the attempt that
    was published last, and a random word; `task`: under which task id. `ticket`: signed by the sender, and removed by
    the worker that decides about the call: without it the call may have begun, whatever `state` says. `killed`: who
    ended it from outside and why, as a sentence; a call that has it is not sent again. `node`: the Celery name of the
    worker that runs it. `noticed_by`, `reason`: of a lost call, the process that noticed the loss and what it saw;
    `ended_at` is then the time of that.
    """

    state: CallState
    attempt: int = Field(default=1, ge=1)
    tool: str = ""
    session: str = ""
    queue: str = ""
    holder: str = ""
    claim: str = ""
    sandbox: str = ""
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    code: str = ""
    nonce: str = ""
    task: str = ""
    killed: str = ""
    ticket: str = ""
    node: str = ""
    noticed_by: str = ""
    reason: str = ""


def seal_ticket(keys: SigningKeys, tenant: str, call_id: str, attempt: int) -> str:
    """Return the ticket of an attempt that is about to be published.

    All other fields are written by scripts without a signature. A process without the secret that claims that a call's
    host was lost cannot make a ticket, so a call that runs is not sent again for such a claim.
    """
    return keys.seal(f"ticket {tenant} {call_id} {attempt}", "")


def has_ticket(keys: SigningKeys, tenant: str, call_id: str, record: CallRecord) -> bool:
    """Whether the record proves that no worker has begun this attempt of the call."""
    try:
        keys.unseal(f"ticket {tenant} {call_id} {record.attempt}", record.ticket)
    except EnvelopeRefused:
        return False
    return True


def parse_record(fields: Mapping[bytes, bytes]) -> CallRecord | None:
    """The record of a hash; None for no hash. Raises ValidationError for one that is none of ours."""
    if not fields:
        return None
    return CallRecord.model_validate(
        {name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False
    )
