"""Records of a tool call: request, context and result. The records are frozen, typed and limited in size."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.traceparent import Traceparent

MAX_OUTPUT_CHARS = 256 * 1024
"""Limit of the text of one result, in characters. Each tool has a lower limit of its own, and reports when it cuts its
output.
"""
MAX_ERROR_CHARS = 16 * 1024
MAX_NAME_CHARS = 128
NO_OUTPUT = "(no output)"
"""The output of a command that printed nothing."""
COMMAND_FAILED = "The command failed. Now correct it with another call."
FOUND_NOTHING = "The command failed or found nothing. Now correct it with another call."
MAX_BLOB_BYTES = 64 * 1024 * 1024
"""Limit, in bytes, of the data of one call that is stored in Redis outside the envelope."""
BLOB_TTL_S = 600
DEFAULT_TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 86_400.0
"""Largest timeout, in seconds, of a call of bash_tool, a skill or `session.exec`, where the tenant class allows more
than MAX_TIMEOUT_S.
"""
GRACE_S = 5.0
"""Seconds that the dispatcher waits beyond the timeout of a call, so that the timeout inside the sandbox applies first.
"""
POOL_GRACE_S = 3.0
"""Seconds that a call without a sandbox has for its cleanup after a timeout or a cancel. Then the process of the call
is killed.
"""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Record(BaseModel):
    """Base of all wire records: immutable, unknown fields are an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
    )


R = TypeVar("R", bound=Record)


def pick_fields(kind: type[R], source: BaseModel, **others: Any) -> R:
    """Return a record of the class `kind`. Fields that `source` also has are copied from `source`; `others` has the
    values of all other fields.
    """
    names = kind.model_fields.keys() & type(source).model_fields.keys()
    return kind(**{name: getattr(source, name) for name in names} | others)


class ToolCall(Record):
    """A request to run one tool once. `arguments` is the only field of the contract that may contain any JSON
    object.
    """

    id: Identifier
    name: ToolName
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class ToolContext(Record):
    """Context that is sent with a call. `deadline_at`: a worker must not start the call after this time, in Unix
    seconds. `timeout_s`: hard limit of the run itself. `blob`: key of bytes in Redis for this call (file content,
    stdin), or None. The key ends with the SHA-256 of the bytes (store/blobs.py).
    """

    tenant: Identifier
    run: Identifier | None = None
    session: Identifier | None = None
    fence: int | None = Field(default=None, ge=1)
    """Fencing token of the session: a number that grows when the session moves to another host. The sender puts in the
    number that it knows. A worker refuses the call if the session has moved since.
    """
    attempt: int = Field(default=1, ge=1)
    sent_at: float
    deadline_at: float
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=LONGEST_TIMEOUT_S)
    cwd: str = Field(default="/workspace", max_length=4096)
    blob: str | None = Field(default=None, max_length=256)
    arguments_blob: str | None = Field(default=None, max_length=256)
    """Key of the blob with the call's arguments as JSON, if the envelope would be too large. The call in the envelope
    then has no arguments. The envelope omits the field if it is None, so that earlier releases can read the envelope.
    """
    model: str | None = Field(default=None, max_length=256)
    config: dict[str, JsonValue] = Field(default_factory=dict)
    text_arguments: bool = False
    """True if the arguments come from a text dialect. Their strings may then be converted by the schema."""
    events: Identifier | None = None
    """The listener that receives the events of the running call (contract/call_events.py); None if there is none."""
    trace: Traceparent | None = None
    """The parent span of the call; None if the call is not traced. The envelope then omits the field, so that earlier
    releases can read it.
    """


class Clocks(Record):
    """Durations of the phases of a call, in seconds. The phases begin when the call is sent, when a worker receives it,
    when the first byte goes to the guest (the program inside the sandbox), and when the run has ended.
    """

    queued_s: float = 0.0
    sandbox_s: float = 0.0
    run_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the duration of the whole call, in seconds: the sum of all phases."""
        return self.queued_s + self.sandbox_s + self.run_s + self.transfer_s

    def __add__(self, other: "Clocks") -> "Clocks":
        """Return the sums of the durations of both, phase by phase."""
        return Clocks(**{name: seconds + getattr(other, name) for name, seconds in self})


class CallUsage(Record):
    """Resources that a call used in its sandbox. Overlapping calls of one session share the resources that were used
    during the overlap. `memory_peak_bytes`: highest memory use of the whole sandbox during the call, including cached
    files; with cgroup v2 before Linux 6.12, since the start of the sandbox. `read_bytes` and `written_bytes`: to and
    from disks; the kernel may write them later. `network_bytes`: both directions.
    """

    cpu_s: float = Field(default=0.0, ge=0)
    memory_peak_bytes: int = Field(default=0, ge=0)
    read_bytes: int = Field(default=0, ge=0)
    written_bytes: int = Field(default=0, ge=0)
    network_bytes: int = Field(default=0, ge=0)

    def __add__(self, other: "CallUsage") -> "CallUsage":
        """Return a usage with the sums of both usages, and the higher of both memory peaks."""
        return CallUsage(
            cpu_s=round(self.cpu_s + other.cpu_s, 6),
            memory_peak_bytes=max(self.memory_peak_bytes, other.memory_peak_bytes),
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            network_bytes=self.network_bytes + other.network_bytes,
        )


class SessionUsage(Record):
    """Totals of a session, counted by one sandboxd process. They only grow. `meter`: random id of this count; a session
    gets a new id, and counts from 0, on another host and after a restart of sandboxd. The totals include the start of
    its sandboxes, background jobs, and calls whose results were lost. `stream_bytes`: bytes of streams, in both
    directions. `sandbox_s`: time in which the session had a sandbox.
    """

    meter: Identifier
    cpu_s: float = Field(default=0.0, ge=0)
    read_bytes: int = Field(default=0, ge=0)
    written_bytes: int = Field(default=0, ge=0)
    network_bytes: int = Field(default=0, ge=0)
    stream_bytes: int = Field(default=0, ge=0)
    sandbox_s: float = Field(default=0.0, ge=0)


class KillReport(Record):
    """The killed processes of a call. `signalled`: their number. `survivors`: number of processes that did not end; if
    there are any, the sandbox is removed. `method`: what was killed (the call's process tree, all processes, or the
    container). `ms`: duration in milliseconds.
    """

    signalled: int = Field(ge=0)
    survivors: int = Field(ge=0)
    method: Literal["tree", "all", "container"]
    ms: float = Field(ge=0)


class SandboxInfo(Record):
    """Sandbox that ran the call. `generation`: grows when the session gets another sandbox. `rebuilt`: the previous
    sandbox died and was replaced. `news`: a sentence about what the previous sandbox lost, in the first result after it
    only.
    """

    id: str
    generation: int = 1
    rebuilt: bool = False
    news: str | None = None


class Spill(Record):
    """File that contains the whole output. It exists if the result is `truncated` and the output was saved."""

    path: str
    bytes: int
    lines: int | None = None


class RunFailure(StrEnum):
    """Reason why a call did not run, or was lost while it ran. Workers set it, and so does admission, which divides the
    workers' slots among the tenants. Tools never set it.

    A result stores the reason in its metadata. Only `metadata` writes these fields, and only `ToolResult.run_failure`
    reads them.
    """

    ADMISSION = "admission"
    """The tenant had no free slot, so the call was never sent."""
    EXPIRED = "expired"
    """The call waited in the queue past its deadline."""
    MOVED = "moved"
    """The session is on another host, or was closed."""
    BROKER = "broker"
    """Redis did not answer before the call started."""
    SANDBOXD = "sandboxd"
    """The host's sandboxd did not answer before the call started."""
    LOST = "lost"
    """The host's sandboxd stopped after the call had started: the call may have had effects."""

    @property
    def is_temporary(self) -> bool:
        """True if the call had no effects and can be sent again soon."""
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
    """The result of a call. A failed call may have `output` too, such as the text printed before a timeout.

    `truncated`: `output` is only a part; `spill` names the file with all of it, if it was saved. `metadata`: values
    that the tool reports, such as the exit code. `blob`: for internal use.
    """

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
    usage: CallUsage | None = Field(default=None, exclude_if=lambda usage: usage is None)
    """Resources that the call used. None: the call used no sandbox, the sandbox was not measured, or the result of the
    call was lost.
    """
    blob: str | None = Field(default=None, max_length=256)
    """Key of result bytes in Redis, which ends with their SHA-256. The orchestrator fetches and deletes the bytes."""

    @classmethod
    def record_fields(cls) -> frozenset[str]:
        """Return the names of the fields that contain another record."""
        kinds = {name: (info.annotation, *get_args(info.annotation)) for name, info in cls.model_fields.items()}
        return frozenset(
            name
            for name, types in kinds.items()
            if any(isinstance(kind, type) and issubclass(kind, Record) for kind in types)
        )

    @classmethod
    def failed(cls, call: ToolCall, code: ErrorCode, error: str, **fields: Any) -> "ToolResult":
        """Return the result of a failed call. `fields`: any other fields of the record.

        Never raises: texts that are too long are cut, an invalid id is changed to a valid one, and invalid fields are
        left out.
        """
        required: dict[str, Any] = {
            "call_id": re.sub(r"[^A-Za-z0-9_-]", "-", call.id)[:64] or "none",
            "name": _printable(call.name, MAX_NAME_CHARS) or "unknown",
            "success": False,
            "error": _printable(error, MAX_ERROR_CHARS),
            "error_code": code,
        }
        try:
            return cls(**required, **fields)
        except ValidationError as error_:
            invalid = {detail["loc"][0] for detail in error_.errors(include_url=False, include_input=False)}
            return cls(**required, **{name: value for name, value in fields.items() if name not in invalid})

    @property
    def run_failure(self) -> RunFailure | None:
        """Reason why the call did not run, or was lost; None for a result of the tool itself."""
        if self.metadata.get(_OUTCOME_LOST) is True:
            return RunFailure.LOST
        reason = self.metadata.get(_NOT_RUN)
        return RunFailure(reason) if reason is not None and reason in list(RunFailure) else None

    @property
    def has_not_run(self) -> bool:
        """True if the call cannot have had effects."""
        return self.run_failure not in (None, RunFailure.LOST)

    def text(self) -> str:
        """Return the text for the model: the output, or `Error [CODE]: sentence` followed by the output before the
        error. The exit status of a command is explained: small models read "(no output)" as "nothing happened", and the
        message of a failed command as the answer.
        """
        if self.success:
            # Some model servers refuse a message without visible text.
            output = self.output or ""
            return self._explain_exit(output if output.strip() else NO_OUTPUT)
        head = f"Error [{self.error_code}]: {self.error}"
        return f"{head}\n{self.output}" if self.output else head

    def _explain_exit(self, output: str) -> str:
        code = self.metadata.get("exit_code")
        if code == 0 and output == NO_OUTPUT:
            return "The command succeeded and printed nothing."
        if not isinstance(code, int) or code == 0:
            return output
        # grep, diff and test exit with status 1 when they worked and found nothing, so status 1 is not shown as a
        # failure.
        return f"{output}\n{FOUND_NOTHING if code == 1 else COMMAND_FAILED}"


class ExecResult(Record):
    """Result of `Session.exec`. `returncode` is -N if signal N ended the program, as in `subprocess`."""

    returncode: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    timed_out: bool = False
    """True if the program was killed at its timeout. `kill` is also set if only its background processes were killed.
    """
    cancelled: bool = False
    """True if the program was killed because its call was cancelled."""
    clocks: Clocks = Clocks()
    kill: KillReport | None = None
    usage: CallUsage | None = None


def _printable(text: str, limit: int) -> str:
    # UTF-8 cannot encode a lone surrogate.
    valid = text.encode("utf-8", "replace").decode()
    return valid if len(valid) <= limit else valid[: limit - 3] + "..."
