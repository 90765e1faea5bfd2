"""Checks a guest's answer: its `done` is hostile until it has the shape of docs/guest-protocol.md."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contract.calls import KillReport, SandboxInfo
from contract.errors import ErrorCode

Count = Annotated[int, Field(ge=0, le=2**63)]
Code = Annotated[int, Field(ge=0, le=255)]
Path = Annotated[str, Field(max_length=8192)]
MAX_MESSAGE_CHARS = 4000

_CODES = {
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
    "NOT_A_REGULAR_FILE": ErrorCode.PATH_NOT_ALLOWED,
    "SPAWN_FAILED": ErrorCode.FILE_NOT_FOUND,
}


_FIGURES = {"size": "size_bytes", "lines": "lines"}
"""The figures that an error may report -> their names in a success."""


class InvalidGuestAnswer(Exception):
    """No guest of ours sends this `done`. The message names the field, never its value."""


class _Shape(BaseModel):
    """Fields that are not named here are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class GuestAnswer(_Shape):
    """The end of any request. sandboxd itself adds `sandbox`, `sandbox_s`, `sandbox_lost` and `workspace_kept`."""

    run_s: float = 0.0
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    sandbox_s: Annotated[float, Field(ge=0)] = 0.0
    sandbox_lost: str | None = None
    workspace_kept: bool = False
    error: dict[str, Any] | None = None


class _Counts(_Shape):
    total: Count
    head: Count
    tail: Count


class _State(_Shape):
    outcome: Literal["none", "kept", "replaced", "too_large", "no_room"]
    folder: Path
    moved: bool
    stray: Path | None
    lost: Path | None


class _Spill(_Shape):
    path: Path
    bytes: Count
    lines: Count | None
    whole: bool


class _Live(_Shape):
    sent: Count
    dropped: Count


class _Job(_Shape):
    job: Annotated[str, Field(pattern=r"\Ajob-[0-9]{1,9}\z")]
    label: Annotated[str, Field(max_length=400)]
    state: Literal["running", "exited", "killed", "lost"]
    exit_code: Code | None
    signal: Code | None
    age_s: Annotated[float, Field(ge=0)]
    unread: Count
    oom: bool = False
    log: Path = ""
    dropped: Count = 0


class _JobOutput(_Shape):
    job: _Job
    streams: dict[Literal["merged"], _Counts]


class _JobInput(_Shape):
    job: _Job
    pending: Count


class _JobList(_Shape):
    jobs: Annotated[list[_Job], Field(max_length=64)]


class _Exec(_Shape):
    exit_code: Code | None
    signal: Code | None
    pipe_status: Annotated[list[Code], Field(max_length=64)] | None = None
    state: _State | None = None
    spill: _Spill | None = None
    spill_failed: bool = False
    live: _Live | None = None
    timed_out: bool
    cancelled: bool
    oom: bool
    streams: dict[Literal["stdout", "stderr", "merged"], _Counts]


class _ReadText(_Shape):
    kind: Literal["text", "image", "document", "directory"]
    size: Count
    lines: Count
    is_counted: bool
    count: Count
    is_out_of_room: bool
    cuts: Annotated[list[Annotated[list[Count], Field(min_length=3, max_length=3)]], Field(max_length=100)]
    encoding: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]
    has_bom: bool
    is_guess: bool
    is_damaged: bool
    newline: Literal["none", "lf", "crlf", "cr", "mixed"]
    final_newline: bool
    type: Annotated[str, Field(pattern=r"\A[A-Za-z0-9 -]{0,60}\z")]
    width: Count
    height: Count
    entries: Count


class _ReadFile(_Shape):
    size: Count


class _WriteFile(_Shape):
    created: bool
    size: Count


class _WriteText(_WriteFile):
    written: Count
    lines: Count
    encoding: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]


class _EditText(_WriteFile):
    replaced: Count
    encoding: Annotated[str, Field(pattern=r"\A[A-Za-z0-9_-]{1,40}\z")]


Names = Annotated[list[Annotated[str, Field(max_length=400)]], Field(max_length=10)]


class _Glob(_Shape):
    total: Count
    shown: Count
    cut: bool
    ignored: Count
    unreadable: Count
    partial: bool
    bad_rules: Names


class _Grep(_Shape):
    engine: Literal["ripgrep", "python"]
    is_file: bool
    matches: Count
    files: Count
    shown: Count
    shown_files: Count
    cut: bool
    cut_lines: Count
    searched: Count
    ignored: Count
    large: Count
    large_names: Names
    binary: Count
    binary_names: Names
    unreadable: Count
    unreadable_names: Names
    bad_rules: Names
    partial: bool


_SHAPES: dict[str, type[_Shape]] = {
    "exec": _Exec,
    "job_start": _JobOutput,
    "job_poll": _JobOutput,
    "job_kill": _JobOutput,
    "job_input": _JobInput,
    "job_list": _JobList,
    "read_text": _ReadText,
    "read_file": _ReadFile,
    "write_file": _WriteFile,
    "write_text": _WriteText,
    "edit_text": _EditText,
    "glob": _Glob,
    "grep": _Grep,
}


def parse_guest_answer(request: Mapping[str, Any], done: Mapping[str, Any]) -> GuestAnswer:
    """Return the common part of `done`, the end of `request`. The fields of the request's own op are checked too.
    Raises InvalidGuestAnswer.
    """
    try:
        answer = GuestAnswer.model_validate(done)
        if answer.error is None:
            _SHAPES[str(request["op"])].model_validate(done)
    except ValidationError as error:
        raise InvalidGuestAnswer(_describe(error)) from None
    if answer.error is None:
        _check_streams(request, done)
    return answer


def parse_error(answer: GuestAnswer) -> tuple[ErrorCode, str, dict[str, int]]:
    """Return code, message and figures of a request that failed. A guest may blame its caller or itself, never the
    operator: any other code is INTERNAL.
    """
    assert answer.error is not None
    code, message = str(answer.error.get("code")), str(answer.error.get("message"))[:MAX_MESSAGE_CHARS]
    if code == ErrorCode.SANDBOX_UNAVAILABLE.value and answer.sandbox_lost is not None:
        # Only sandboxd reports that a sandbox was lost.
        return ErrorCode.SANDBOX_UNAVAILABLE, _clean(message), {}
    figures = {ours: answer.error[name] for name, ours in _FIGURES.items() if _is_count(answer.error.get(name))}
    return _CODES.get(code, ErrorCode.INTERNAL), _clean(message), figures


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**63


def _check_streams(request: Mapping[str, Any], done: Mapping[str, Any]) -> None:
    """Check that every stream of the request is counted."""
    expected = {"stdout", "stderr"} if "stream" in request.get("capture", {}) else set(request.get("capture", {}))
    missing = expected - set(done.get("streams", {}))
    if missing:
        raise InvalidGuestAnswer(f"streams: {', '.join(sorted(missing))} missing")


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    # The first part is a field of ours; what follows may be a key of the guest's.
    return f"{first['loc'][0]}: {first['type']}"


def _clean(text: str) -> str:
    """Return the text without half surrogate pairs, which no UTF-8 of ours can carry."""
    return text.encode("utf-8", "replace").decode()
