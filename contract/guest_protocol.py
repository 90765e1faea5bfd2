"""The operations of the guest, the program that runs as PID 1 of a sandbox: each one's request and answer.

docs/guest-protocol.md describes the operations. The guest has classes of its own with the same names, because it uses
only the standard library; tests/conformance compares both sides.

The guest may be hostile. So the last header of its answer, `done`, is used only after a check against the record of the
answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolcrew.contract.calls import CallUsage, KillReport, SandboxInfo, SessionUsage
from toolcrew.contract.errors import ErrorCode

# Every field has a limit. Numbers from a guest are added and stored in JSON, and texts from a guest reach results, logs
# and models.
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Code = Annotated[int, Field(ge=0, le=255)]
_PathText = Annotated[str, Field(max_length=8192)]
_Codec = Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]
_Names = Annotated[list[Annotated[str, Field(max_length=400)]], Field(max_length=10)]
_Cut = Annotated[list[_Count], Field(min_length=3, max_length=3)]
MAX_MESSAGE_CHARS = 4000


# --- Answers ----------------------------------------------------------------------------------------------------------


class InvalidGuestAnswer(Exception):
    """Error for an answer (`done`) that no correct guest sends. The message names the field, never its value."""


class _Record(BaseModel):
    """Base class of the records of an answer. Unknown fields are ignored."""

    # `strict`: otherwise text in place of a number would be converted. `allow_inf_nan`: NaN would pass every limit,
    # because each comparison with NaN is false.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class GuestAnswer(_Record):
    """The fields that all answers share. The guest sends `run_s` and `kill`; sandboxd adds the others."""

    run_s: float = 0.0
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    sandbox_s: Annotated[float, Field(ge=0)] = 0.0
    sandbox_lost: str | None = None
    workspace_kept: bool = False
    usage: CallUsage | None = None
    session_usage: SessionUsage | None = None


class FailedAnswer(GuestAnswer):
    """The answer to a request that failed. Only the fields of all answers and the error are used."""

    error: dict[str, Any]


class StreamCounts(_Record):
    """Numbers of bytes of a captured stream. Head and tail were sent; what lies between them was dropped."""

    total: _Count
    head: _Count
    tail: _Count


class ShellStateReport(_Record):
    """The result of storing the state of a session's shell."""

    outcome: Literal["none", "kept", "replaced", "too_large", "no_room"]
    folder: _PathText
    moved: bool
    stray: _PathText | None
    lost: _PathText | None


class SpillReport(_Record):
    """The file with the complete output of a command."""

    path: _PathText
    bytes: _Count
    lines: _Count | None
    whole: bool


class LiveCounts(_Record):
    """Numbers of bytes of the output that was sent while the program ran."""

    sent: _Count
    dropped: _Count


class ExecAnswer(GuestAnswer):
    exit_code: _Code | None
    signal: _Code | None
    pipe_status: Annotated[list[_Code], Field(max_length=64)] | None = None
    state: ShellStateReport | None = None
    spill: SpillReport | None = None
    spill_failed: bool = False
    live: LiveCounts | None = None
    supervisor_killed: bool = False
    timed_out: bool
    cancelled: bool
    oom: bool
    streams: dict[Literal["stdout", "stderr", "merged"], StreamCounts]


class JobReport(_Record):
    """The state of a background job."""

    job: Annotated[str, Field(pattern=r"\Ajob-[0-9]{1,9}\z")]
    label: Annotated[str, Field(max_length=400)]
    state: Literal["running", "exited", "killed", "lost"]
    exit_code: _Code | None
    signal: _Code | None
    age_s: Annotated[float, Field(ge=0)]
    unread: _Count
    oom: bool = False
    log: _PathText = ""
    dropped: _Count = 0


class JobOutputAnswer(GuestAnswer):
    job: JobReport
    streams: dict[Literal["merged"], StreamCounts]


class JobInputAnswer(GuestAnswer):
    job: JobReport
    pending: _Count


class JobListAnswer(GuestAnswer):
    jobs: Annotated[list[JobReport], Field(max_length=64)]


class ReadTextAnswer(GuestAnswer):
    kind: Literal["text", "image", "document", "directory"]
    size: _Count
    lines: _Count
    is_counted: bool
    count: _Count
    is_out_of_room: bool
    cuts: Annotated[list[_Cut], Field(max_length=100)]
    encoding: _Codec
    has_bom: bool
    is_guess: bool
    is_damaged: bool
    newline: Literal["none", "lf", "crlf", "cr", "mixed"]
    final_newline: bool
    type: Annotated[str, Field(pattern=r"\A[A-Za-z0-9 -]{0,60}\z")]
    entries: _Count


class ReadFileAnswer(GuestAnswer):
    size: _Count


class WriteFileAnswer(GuestAnswer):
    created: bool
    size: _Count


class WriteTextAnswer(WriteFileAnswer):
    written: _Count
    lines: _Count
    encoding: _Codec


class EditTextAnswer(WriteFileAnswer):
    replaced: _Count
    encoding: _Codec


class SearchAnswer(GuestAnswer):
    """The fields that both searches share."""

    shown: _Count
    cut: bool
    ignored: _Count
    unreadable: _Count
    partial: bool
    hints: _Names


class GlobAnswer(SearchAnswer):
    total: _Count


class GrepAnswer(SearchAnswer):
    is_file: bool
    matches: _Count
    files: _Count
    shown_files: _Count
    cut_lines: _Count
    searched: _Count | None
    large: _Count
    large_names: _Names
    binary: _Count
    binary_names: _Names
    unreadable_names: _Names


A = TypeVar("A", bound=GuestAnswer, covariant=True)


# --- Requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GuestRequest(Generic[A]):
    """Base class of requests. A field with its default value is not sent.

    `ANSWER`: the record of the answer. `STREAMS`: the streams whose data the answer may have. `READS_ONLY`: the request
    does not change files; every other request may change files, even if it fails.
    """

    OP: ClassVar[str]
    ANSWER: ClassVar[type[GuestAnswer]]
    STREAMS: ClassVar[frozenset[str]] = frozenset()
    READS_ONLY: ClassVar[bool] = False
    timeout_s: float

    def as_header(self) -> dict[str, Any]:
        """Return the request as the header of a frame."""
        cls = type(self)
        fields = {name: value for name, value in vars(self).items() if value != getattr(cls, name, ...)}
        return {"op": self.OP, **fields}

    @property
    def captured(self) -> frozenset[str]:
        """Return the streams that a correct answer counts."""
        return frozenset()


@dataclass(frozen=True, kw_only=True)
class ExecRequest(GuestRequest[ExecAnswer]):
    OP = "exec"
    ANSWER = ExecAnswer
    STREAMS = frozenset({"stdout", "stderr", "merged", "live", "live_stderr"})
    argv: list[str] | None
    script_bytes: int = field(default_factory=int)
    cwd: str | None
    env: Mapping[str, str] = field(default_factory=dict)
    capture: Mapping[str, int] = field(default_factory=dict)
    state: str = "none"
    spill: Mapping[str, int] | None = None
    live: bool = False
    max_bytes: int = 0

    @property
    def captured(self) -> frozenset[str]:
        return frozenset({"stdout", "stderr"} if "stream" in self.capture else self.capture)


@dataclass(frozen=True, kw_only=True)
class ReadTextRequest(GuestRequest[ReadTextAnswer]):
    OP = "read_text"
    ANSWER = ReadTextAnswer
    STREAMS = frozenset({"file"})
    READS_ONLY = True
    path: str
    offset: int
    limit: int
    column: int
    encoding: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class ReadFileRequest(GuestRequest[ReadFileAnswer]):
    OP = "read_file"
    ANSWER = ReadFileAnswer
    STREAMS = frozenset({"file"})
    READS_ONLY = True
    path: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class WriteFileRequest(GuestRequest[WriteFileAnswer]):
    OP = "write_file"
    ANSWER = WriteFileAnswer
    path: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class WriteTextRequest(GuestRequest[WriteTextAnswer]):
    OP = "write_text"
    ANSWER = WriteTextAnswer
    STREAMS = frozenset({"file"})
    path: str
    mode: str
    encoding: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class EditTextRequest(GuestRequest[EditTextAnswer]):
    OP = "edit_text"
    ANSWER = EditTextAnswer
    STREAMS = frozenset({"file"})
    path: str
    expected_count: int | None = None
    tolerance: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class GlobRequest(GuestRequest[GlobAnswer]):
    OP = "glob"
    ANSWER = GlobAnswer
    STREAMS = frozenset({"lines", "found"})
    READS_ONLY = True
    pattern: str
    path: str
    kind: str
    limit: int
    include_ignored: bool
    max_bytes: int
    live_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class GrepRequest(GuestRequest[GrepAnswer]):
    OP = "grep"
    ANSWER = GrepAnswer
    STREAMS = frozenset({"lines"})
    READS_ONLY = True
    pattern: str
    path: str
    include: str | None = None
    exclude: str | None = None
    type: str | None = None
    ignore_case: bool
    fixed_strings: bool
    multiline: bool
    include_ignored: bool
    before: int
    after: int
    mode: str
    limit: int
    max_per_file: int | None = None
    max_bytes: int
    max_lines: int


@dataclass(frozen=True, kw_only=True)
class JobStartRequest(GuestRequest[JobOutputAnswer]):
    OP = "job_start"
    ANSWER = JobOutputAnswer
    STREAMS = frozenset({"merged"})
    script_bytes: int
    cwd: str | None
    label: str
    wait_ms: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class JobPollRequest(GuestRequest[JobOutputAnswer]):
    OP = "job_poll"
    ANSWER = JobOutputAnswer
    STREAMS = frozenset({"merged"})
    READS_ONLY = True
    job: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class JobInputRequest(GuestRequest[JobInputAnswer]):
    OP = "job_input"
    ANSWER = JobInputAnswer
    job: str
    close: bool


@dataclass(frozen=True, kw_only=True)
class JobKillRequest(GuestRequest[JobOutputAnswer]):
    OP = "job_kill"
    ANSWER = JobOutputAnswer
    STREAMS = frozenset({"merged"})
    job: str
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class JobListRequest(GuestRequest[JobListAnswer]):
    OP = "job_list"
    ANSWER = JobListAnswer
    READS_ONLY = True


REQUESTS: Mapping[str, type[GuestRequest[GuestAnswer]]] = {
    request.OP: request
    for request in (
        ExecRequest,
        ReadTextRequest,
        ReadFileRequest,
        WriteFileRequest,
        WriteTextRequest,
        EditTextRequest,
        GlobRequest,
        GrepRequest,
        JobStartRequest,
        JobPollRequest,
        JobInputRequest,
        JobKillRequest,
        JobListRequest,
    )
}
"""The record of each request by its `op`."""


@dataclass(frozen=True)
class GuestReply(Generic[A]):
    """The checked answer to a request, and the bytes of each stream."""

    answer: A
    streams: Mapping[str, bytes] = field(default_factory=dict)


# --- The check of an answer -------------------------------------------------------------------------------------------

GUEST_CODES = {
    **{
        code.value: code
        for code in (
            ErrorCode.INVALID_ARGUMENTS,
            ErrorCode.FILE_NOT_FOUND,
            ErrorCode.FILE_EXISTS,
            ErrorCode.IS_DIRECTORY,
            ErrorCode.NOT_A_DIRECTORY,
            ErrorCode.PATH_NOT_ALLOWED,
            ErrorCode.FILE_TOO_LARGE,
            ErrorCode.INVALID_PATTERN,
            ErrorCode.BINARY_FILE,
            ErrorCode.OFFSET_OUT_OF_RANGE,
            ErrorCode.PERMISSION_DENIED,
            ErrorCode.NO_MATCH,
            ErrorCode.AMBIGUOUS_MATCH,
            ErrorCode.NO_CHANGE,
            ErrorCode.STALE_FILE,
            ErrorCode.NO_SPACE,
            ErrorCode.TIMEOUT,
            ErrorCode.CANCELLED,
        )
    },
    # Error codes that a guest may report. Codes that blame the operator are not in this table.
    "NOT_A_REGULAR_FILE": ErrorCode.PATH_NOT_ALLOWED,
    "SPAWN_FAILED": ErrorCode.FILE_NOT_FOUND,
}
_FIGURES = {"size": "size_bytes", "lines": "lines"}
"""Numeric fields that an error may report -> the names of the same fields in a successful answer."""


def parse_guest_answer(request: GuestRequest[A], done: Mapping[str, Any]) -> A | FailedAnswer:
    """Check `done`, the guest's answer to `request`, and return it. Raises InvalidGuestAnswer."""
    try:
        # With an error, no field of a successful answer is used, so none is checked.
        if done.get("error") is not None:
            return FailedAnswer.model_validate(done)
        answer = request.ANSWER.model_validate(done)
    except ValidationError as error:
        # `from None`: the original error quotes the value.
        raise InvalidGuestAnswer(_describe(error)) from None
    # Tools read the counts of the streams by name. A missing one would be a KeyError in the tool, which looks like a
    # bug of ours.
    missing = request.captured - getattr(answer, "streams", {}).keys()
    if missing:
        raise InvalidGuestAnswer(f"streams: {', '.join(sorted(missing))} missing")
    return cast(A, answer)


def parse_error(answer: FailedAnswer) -> tuple[ErrorCode, str, dict[str, int]]:
    """Return the code, the message and the numeric details of a failed request.

    A guest may blame its caller or itself, never the operator. Any other code becomes INTERNAL.
    """
    code, message = str(answer.error.get("code")), str(answer.error.get("message"))[:MAX_MESSAGE_CHARS]
    if code == ErrorCode.SANDBOX_UNAVAILABLE.value and answer.sandbox_lost is not None:
        # Only sandboxd reports that a sandbox was lost.
        return ErrorCode.SANDBOX_UNAVAILABLE, _clean(message), {}
    figures = {
        metadata_name: answer.error[name]
        for name, metadata_name in _FIGURES.items()
        if _is_count(answer.error.get(name))
    }
    return GUEST_CODES.get(code, ErrorCode.INTERNAL), _clean(message), figures


def _is_count(value: object) -> bool:
    # Exclude booleans: in Python, true and false of JSON count as numbers.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**63


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    # Report only the first part of the location, the name of a field. The rest may be a key that the guest chose.
    return f"{first['loc'][0]}: {first['type']}"


def _clean(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
