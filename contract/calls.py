"""The records of one tool call: what is asked, what travels with it, what comes back. Frozen, fully typed,
size-capped.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from contract.errors import ErrorCode
from contract.traceparent import Traceparent

MAX_OUTPUT_CHARS = 256 * 1024
"""Text of one result; tools cut far earlier and say so."""
MAX_ERROR_CHARS = 16 * 1024
MAX_NAME_CHARS = 128
MAX_BLOB_BYTES = 64 * 1024 * 1024
"""Bytes that travel beside one envelope, in Redis."""
BLOB_TTL_S = 600
DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 600.0
GRACE_S = 5.0
"""What the dispatcher waits beyond a call's own limit, so that the limit inside the sandbox wins."""
POOL_GRACE_S = 3.0
"""How long a call without a sandbox may take to clean up, at its limit or when it is cancelled, before its process is
killed.
"""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Record(BaseModel):
    """Base of all wire records: immutable, unknown fields are an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
    )


class ToolCall(Record):
    """A request to run one tool once. `arguments` is the only free dict of the contract."""

    id: Identifier
    name: ToolName
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class ToolContext(Record):
    """What travels with a call.

    `deadline_at`: Unix seconds after which a worker must not start it. `timeout_s`: hard limit of the run itself.
    `blob`: key of bytes in Redis for this call (file content, stdin), or None. It ends with their SHA-256
    (store/blobs.py).
    """

    tenant: Identifier
    run: Identifier | None = None
    session: Identifier | None = None
    fence: int | None = Field(default=None, ge=1)
    """Of the session's place as the sender knew it: a worker refuses the call when the session has moved since."""
    attempt: int = Field(default=1, ge=1)
    sent_at: float
    deadline_at: float
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)
    cwd: str = Field(default="/workspace", max_length=4096)
    blob: str | None = Field(default=None, max_length=256)
    arguments_blob: str | None = Field(default=None, max_length=256)
    """Key of the blob that has the call's arguments as JSON, if the envelope would be too large. The call in the
    envelope then has none. Not in the envelope when None, so that workers of earlier releases can read it."""
    model: str | None = Field(default=None, max_length=256)
    config: dict[str, JsonValue] = Field(default_factory=dict)
    text_arguments: bool = False
    """True when the arguments came from a text dialect: strings may then be coerced by the schema."""
    events: Identifier | None = None
    """The listener of the process that wants to hear of the call while it runs (contract/call_events.py); None: nobody
    does.
    """
    trace: Traceparent | None = None
    """The span that the call is a part of; None, and then not in the envelope at all, which releases without it read:
    nobody traces it.
    """


class Clocks(Record):
    """Seconds, each started at its own event: sent, taken by a worker, first byte to the guest, result received."""

    queued_s: float = 0.0
    sandbox_s: float = 0.0
    run_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return how long the call took."""
        return self.queued_s + self.sandbox_s + self.run_s + self.transfer_s

    def __add__(self, other: "Clocks") -> "Clocks":
        """Return the sum of every field."""
        return Clocks(**{name: seconds + getattr(other, name) for name, seconds in self})


class KillReport(Record):
    """Present whenever anything was killed. `survivors` other than 0 means that the sandbox was removed."""

    signalled: int = Field(ge=0)
    survivors: int = Field(ge=0)
    method: Literal["tree", "all", "container"]
    ms: float = Field(ge=0)


class SandboxInfo(Record):
    """Which sandbox ran the call. `rebuilt`: one of this session died and was made anew; `news`: told once, what that
    cost.
    """

    id: str
    generation: int = 1
    rebuilt: bool = False
    news: str | None = None


class Spill(Record):
    """Where the whole output lies when `truncated` and it was kept."""

    path: str
    bytes: int
    lines: int | None = None


class RunFailure(StrEnum):
    """Why a call did not run, or was lost while it ran. Written by a worker or by admission, never by a tool.

    In a result it is a field of `metadata`. Only `metadata` writes it, and only `ToolResult.run_failure` reads it.
    """

    ADMISSION = "admission"
    """Its tenant had no slot: it was never sent."""
    EXPIRED = "expired"
    """It waited in the queue past its deadline."""
    MOVED = "moved"
    """Its session is on another host, or was closed."""
    BROKER = "broker"
    """Redis did not answer before it began."""
    SANDBOXD = "sandboxd"
    """The host's sandboxd did not answer before it began."""
    LOST = "lost"
    """The host's sandboxd went away after it began: it may have acted."""

    @property
    def is_temporary(self) -> bool:
        """Return True for a call that has not acted and can run a moment later."""
        return self in (RunFailure.MOVED, RunFailure.BROKER, RunFailure.SANDBOXD)

    @property
    def metadata(self) -> dict[str, JsonValue]:
        return {_OUTCOME_LOST: True} if self is RunFailure.LOST else {_NOT_RUN: self.value}

    @staticmethod
    def remove(metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool's metadata without the fields of a failure."""
        return {name: value for name, value in metadata.items() if name not in (_NOT_RUN, _OUTCOME_LOST)}


_NOT_RUN, _OUTCOME_LOST = "not_run", "outcome_lost"


class ToolResult(Record):
    """The one answer to a call. `output` may be there beside an error: what was printed before a timeout."""

    call_id: Identifier
    name: ToolName
    success: bool
    output: str | None = Field(default=None, max_length=MAX_OUTPUT_CHARS)
    error: str | None = Field(default=None, max_length=MAX_ERROR_CHARS)
    error_code: ErrorCode | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    truncated: bool = False
    spill: Spill | None = None
    clocks: Clocks = Clocks()
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    blob: str | None = Field(default=None, max_length=256)
    """Key of result bytes in Redis, which ends with their SHA-256; the orchestrator fetches and deletes them."""

    @classmethod
    def failed(cls, call: ToolCall, code: ErrorCode, error: str, **fields: Any) -> "ToolResult":
        """A result that says why `call` did not succeed; `fields` are any other fields of the record.

        It is always one: what is too long is cut, an id that does not fit is spelled so that it does, and a field that
        does not fit is left out.
        """
        told: dict[str, Any] = {
            "call_id": re.sub(r"[^A-Za-z0-9_-]", "-", call.id)[:64] or "none",
            "name": _printable(call.name, MAX_NAME_CHARS) or "unknown",
            "success": False,
            "error": _printable(error, MAX_ERROR_CHARS),
            "error_code": code,
        }
        try:
            return cls(**told, **fields)
        except ValidationError as unfit:
            names = {complaint["loc"][0] for complaint in unfit.errors(include_url=False, include_input=False)}
            return cls(**told, **{name: value for name, value in fields.items() if name not in names})

    @property
    def run_failure(self) -> RunFailure | None:
        """Why the call did not run, or was lost; None when the result is the tool's own."""
        if self.metadata.get(_OUTCOME_LOST) is True:
            return RunFailure.LOST
        reason = self.metadata.get(_NOT_RUN)
        return RunFailure(reason) if reason is not None and reason in list(RunFailure) else None

    @property
    def has_not_run(self) -> bool:
        """Return True for a call that cannot have acted."""
        return self.run_failure not in (None, RunFailure.LOST)

    def text(self) -> str:
        """What a model reads: the output, or `Error [CODE]: sentence` with what was printed until then."""
        if self.success:
            return self.output if self.output is not None else ""
        head = f"Error [{self.error_code}]: {self.error}"
        return f"{head}\n{self.output}" if self.output else head


class ExecResult(Record):
    """What `Session.exec` gives back. `returncode` is -N when signal N ended the program, as in `subprocess`."""

    returncode: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    timed_out: bool = False
    """It was ended at its limit. `kill` alone does not say so: what a program leaves running is killed as well."""
    clocks: Clocks = Clocks()
    kill: KillReport | None = None


def _printable(text: str, limit: int) -> str:
    """At most `limit` characters, without half surrogate pairs, which no UTF-8 carries."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= limit else whole[: limit - 3] + "..."
