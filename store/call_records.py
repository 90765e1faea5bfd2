"""Records of calls in Redis: one hash for each call id."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from toolcrew.contract.calls import Identifier, Record
from toolcrew.contract.errors import EnvelopeRefused
from toolcrew.contract.signing import SigningKeys

CALL_TTL_S = 24 * 3600
"""Lifetime of a call's record, in seconds. Until then, the call id cannot be used again."""
RESULT_TTL_S = 3600
"""Lifetime of a result in Redis, in seconds. The caller must read the result within this time."""
CALLS_LISTED = 1000
"""Maximum number of calls in the list of a tenant, including calls that have ended."""
MAX_REASON_CHARS = 500
MAX_ATTEMPTS = 3
"""Maximum number of attempts at a call. A lost call is sent again only if it cannot have had effects, or if its tool is
idempotent.
"""


class CallState(StrEnum):
    """The state of a call. QUEUED and RUNNING: the call has not ended. LOST: its worker has died; the call may be sent
    again.
    """

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    UNKNOWN = "unknown"
    FORBIDDEN = "forbidden"

    @property
    def has_ended(self) -> bool:
        """Return whether the call neither waits nor runs in this state."""
        return self not in (CallState.QUEUED, CallState.RUNNING)

    @property
    def is_lost(self) -> bool:
        """Return whether no worker will finish this attempt at the call."""
        return self in (CallState.LOST, CallState.UNKNOWN)


class CallClaim(StrEnum):
    """The decision on a worker's request to start a call."""

    GRANTED = "granted"
    STARTED = "started"
    """The call has started or was forbidden before. The message is a repetition, and no process waits for its result.
    """
    SUPERSEDED = "superseded"
    """A later attempt at the same call exists."""
    MOVED = "moved"
    """The session of the call has moved to another host, or was closed."""
    EXPIRED = "expired"
    """The deadline of the call had passed. The claim has forbidden the call."""


class CallRecord(Record):
    """The record of a call. Its hash in Redis contains only text. A missing field is unknown. Times are Unix seconds
    of the shared clock.

    - `holder`: the process that runs the call (contract/hosts.py: holder_name).
    - `claim`: the random token of the claim that started the call. By the token, a repeated claim recognizes that it
    has started the call itself.
    - `code`: the error code of the result; "" if the call succeeded.
    - `nonce`: the last published attempt and a random token.
    - `task`: the Celery task id of the attempt.
    - `ticket`: a signature by the sender. The worker that decides about the call removes the ticket. Without a ticket,
      the call may have started, even if `state` says otherwise.
    - `request_digest`: the digest of the content of a call whose caller chose its id; "" for any other call.
    - `killed`: a sentence that says who ended the call from outside, and why. A killed call is not sent again.
    - `node`: the Celery name of the worker that runs the call.
    - `is_counted`: whether the call is in the usage of its tenant. An end of a later attempt does not count it again.
    - `noticed_by`, `reason`: for a lost call, the process that noticed the loss, and the cause. `ended_at` is then the
      time at which the loss was noticed.
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
    request_digest: str = ""
    killed: str = ""
    ticket: str = ""
    node: str = ""
    is_counted: bool = False
    noticed_by: str = ""
    reason: str = ""


def seal_ticket(keys: SigningKeys, tenant: str, call_id: str, attempt: int) -> str:
    """Return the ticket of an attempt that is about to be published.

    Scripts write all other fields without a signature. A process without the secret can falsely claim that the host of
    a call was lost. The process cannot create a ticket, so a running call is not sent again because of that claim.
    """
    return keys.seal(f"ticket {tenant} {call_id} {attempt}", "")


def has_ticket(keys: SigningKeys, tenant: str, call_id: str, record: CallRecord) -> bool:
    """Return whether the record proves that no worker has started this attempt at the call."""
    try:
        keys.unseal(f"ticket {tenant} {call_id} {record.attempt}", record.ticket)
    except EnvelopeRefused:
        return False
    return True


def parse_record(fields: Mapping[bytes, bytes]) -> CallRecord | None:
    """Return the record in a hash; None for an empty hash. Raises ValidationError: the hash is not a valid record."""
    if not fields:
        return None
    return CallRecord.model_validate(
        {name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False
    )


class KillOrder(Record):
    """An order to kill a call, with its author and reason. `entry`: the entry for the audit log. The process that
    executes the order writes the entry.
    """

    tenant: Identifier
    call: Identifier
    by: str = Field(max_length=128)
    reason: str = Field(default="", max_length=MAX_REASON_CHARS)
    entry: str = ""

    def describe(self) -> str:
        """Return the message for the caller of the call."""
        return f"the call was killed by {self.by}" + (f": {self.reason}" if self.reason else "")
