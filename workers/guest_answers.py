"""What a guest says at the end of a request, checked: its `done` is hostile until it has the shape of docs/guest-protocol.md."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contract.calls import KillReport, SandboxInfo
from contract.errors import ErrorCode

Count = Annotated[int, Field(ge=0, le=2**63)]
MAX_WORDS_CHARS = 4000

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
            ErrorCode.OFFSET_OUT_OF_RANGE,
            ErrorCode.PERMISSION_DENIED,
            ErrorCode.NO_SPACE,
            ErrorCode.TIMEOUT,
            ErrorCode.CANCELLED,
        )
    },
    "NOT_A_REGULAR_FILE": ErrorCode.PATH_NOT_ALLOWED,
    "SPAWN_FAILED": ErrorCode.FILE_NOT_FOUND,
}


class GuestNonsense(Exception):
    """A `done` that no guest of ours sends. The message names the field, never its value."""


class _Shape(BaseModel):
    """Fields that are not named here are nobody's business."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Told(_Shape):
    """What the end of any request tells. `sandbox`, `sandbox_s` and `sandbox_lost` are sandboxd's own words."""

    run_s: float = 0.0
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    sandbox_s: Annotated[float, Field(ge=0)] = 0.0
    sandbox_lost: str | None = None
    error: dict[str, Any] | None = None


class _Counts(_Shape):
    total: Count
    head: Count
    tail: Count


class _Exec(_Shape):
    exit_code: Annotated[int, Field(ge=0, le=255)] | None
    signal: Annotated[int, Field(ge=0, le=255)] | None
    timed_out: bool
    cancelled: bool
    oom: bool
    streams: dict[Literal["stdout", "stderr", "merged"], _Counts]


class _ReadLines(_Shape):
    size: Count
    lines: Count
    cut: bool
    final_newline: bool


class _ReadFile(_Shape):
    size: Count


class _WriteFile(_Shape):
    created: bool
    size: Count


_SHAPES: dict[str, type[_Shape]] = {"exec": _Exec, "read_lines": _ReadLines, "read_file": _ReadFile, "write_file": _WriteFile}


def parse_told(request: Mapping[str, Any], done: Mapping[str, Any]) -> Told:
    """What `done`, the end of `request`, tells; the fields of the request's own op are there and of their type. Raises GuestNonsense."""
    try:
        told = Told.model_validate(done)
        if told.error is None:
            _SHAPES[str(request["op"])].model_validate(done)
    except ValidationError as error:
        raise GuestNonsense(_complaint(error)) from None
    if told.error is None:
        _check_streams(request, done)
    return told


def parse_error(told: Told) -> tuple[ErrorCode, str]:
    """Code and sentence of a request that failed. A guest may blame its caller or itself, never the operator: any other code is INTERNAL."""
    assert told.error is not None
    code, words = str(told.error.get("code")), str(told.error.get("message"))[:MAX_WORDS_CHARS]
    if code == ErrorCode.SANDBOX_UNAVAILABLE.value and told.sandbox_lost is not None:
        # Only sandboxd says that a sandbox was lost.
        return ErrorCode.SANDBOX_UNAVAILABLE, _clean(words)
    return _CODES.get(code, ErrorCode.INTERNAL), _clean(words)


def _check_streams(request: Mapping[str, Any], done: Mapping[str, Any]) -> None:
    """Every stream that was asked for is counted."""
    asked = {"stdout", "stderr"} if "stream" in request.get("capture", {}) else set(request.get("capture", {}))
    missing = asked - set(done.get("streams", {}))
    if missing:
        raise GuestNonsense(f"streams: {', '.join(sorted(missing))} missing")


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    # The first part is a field of ours; what follows may be a key of the guest's.
    return f"{first['loc'][0]}: {first['type']}"


def _clean(text: str) -> str:
    """A guest's text without half surrogate pairs, which no UTF-8 of ours can carry."""
    return text.encode("utf-8", "replace").decode()
