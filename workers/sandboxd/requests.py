"""Checks the requests of workers and the answers of guests. A wrong field in a worker's request is
INVALID_ARGUMENTS.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from contract.errors import ErrorCode, ToolFailure
from contract.tenancy import SandboxTerms

MAX_TIMEOUT_S = 600.0
MAX_BODY_BYTES = 67_108_864
STREAM_FRAMES = 262_144
"""Maximum number of frames of a streamed output, whatever its size: a program may write one byte at a time."""
FRAME_COST_BYTES = 64
"""The cost of a data frame in addition to its body, so that empty frames are not free."""
_STREAM_STDERR_BYTES = 65_536
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}:[A-Za-z0-9_-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_JOB_OPS = ("job_start", "job_poll", "job_input", "job_kill", "job_list")
_OPS = ("exec", "read_text", "read_file", "write_file", "write_text", "edit_text", "glob", "grep", "ping", *_JOB_OPS)
SANDBOXD_FIELDS = frozenset(
    {"ok", "code", "message", "is_ending", "sandbox", "sandbox_s", "sandbox_lost", "removal_failed", "workspace_kept"}
)
"""Fields of a call's answer that only sandboxd may set."""
_STREAMS: Mapping[str, frozenset[str]] = {
    "exec": frozenset({"stdout", "stderr", "merged", "live", "live_stderr"}),
    "job_start": frozenset({"merged"}),
    "job_poll": frozenset({"merged"}),
    "job_kill": frozenset({"merged"}),
    "read_text": frozenset({"file"}),
    "read_file": frozenset({"file"}),
    "write_text": frozenset({"file"}),
    "edit_text": frozenset({"file"}),
    "glob": frozenset({"lines"}),
    "grep": frozenset({"lines"}),
}
_KILL_FIELDS = ("signalled", "survivors", "method", "ms")
_KILL_METHODS = ("tree", "all")
_QUOTE_CHARS = 200


def check_request(request: object) -> dict[str, Any]:
    """Return a call's request with `timeout_s`, `body_bytes` and `max_bytes` as numbers within limits. The guest checks
    the other fields.
    """
    if not isinstance(request, dict) or request.get("op") not in _OPS:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"a call needs a request whose op is one of {', '.join(_OPS)}")
    timeout_s = parse_number(request, "timeout_s", 30.0, MAX_TIMEOUT_S)
    size = _parse_count(request, "body_bytes")
    if size > MAX_BODY_BYTES:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"body_bytes must be at most {MAX_BODY_BYTES}")
    if "max_bytes" in request:
        _parse_count(request, "max_bytes")
    return {**request, "timeout_s": timeout_s, "body_bytes": size}


def count_budget(request: Mapping[str, Any]) -> int:
    """Return how many bytes of data frames a checked request may cause."""
    total = int(request.get("max_bytes", 0))
    capture = request.get("capture")
    if isinstance(capture, dict):
        total += sum(max(value, 0) for value in capture.values() if isinstance(value, int))
        if "stream" in capture:
            total += _STREAM_STDERR_BYTES + FRAME_COST_BYTES * min(max(total, 0), STREAM_FRAMES)
    return total


def parse_text(header: Mapping[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not value:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'{name}' is missing")
    return value


def parse_session(header: Mapping[str, Any]) -> str:
    """Return the name of a session, `<tenant>:<session>`. Neither part contains a colon, so no two tenants share a
    name.
    """
    name = parse_text(header, "sandbox")
    if _SESSION.fullmatch(name) is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"'{name[:200]}' is no name of a session: <tenant>:<session>, each of A-Z, a-z, 0-9, _ and -",
        )
    return name


def parse_fence(header: Mapping[str, Any]) -> int | None:
    """Return which opening of a session the request refers to, or None for any."""
    return _parse_count(header, "fence") if "fence" in header else None


def parse_terms(header: Mapping[str, Any]) -> SandboxTerms | None:
    """Return the tenant's current sandbox terms, or None when the request has none."""
    terms = header.get("terms")
    if terms is None:
        return None
    try:
        return SandboxTerms.model_validate(terms)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in ("terms", *first["loc"]))
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"{name[:200]}: {first['msg'][:200]}: fix the tenant's policy"
        ) from None


def parse_skill(header: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return scope, digest and archive size of a request about a skill. The scope is "" for a skill that all tenants
    share. A size of 0 means that no archive follows.
    """
    digest = parse_text(header, "digest")
    if not _DIGEST.fullmatch(digest):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "digest must be a sha256 in hex")
    scope = "" if header.get("shared") is True else parse_session(header).partition(":")[0]
    return scope, digest, _parse_count(header, "body_bytes")


def parse_number(header: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = header.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{name} must be a number above 0 and at most {most:g}")
    return value


def _parse_count(header: Mapping[str, Any], name: str) -> int:
    value = header.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{name} must be a whole number of at least 0")
    return value


def has_stream(op: str, stream: object) -> bool:
    """Return True when a request of that op may be answered with data of that stream."""
    return isinstance(stream, str) and stream in _STREAMS.get(op, ())


def build_done(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guest's answer without the fields that only sandboxd may set. Only the kill report is checked here,
    because sandboxd counts kills.

    The worker that made the call checks every field (workers/guest_answers.py).
    """
    done = {name: value for name, value in header.items() if name not in SANDBOXD_FIELDS and name != "id"}
    if "kill" in done:
        done["kill"] = _build_kill(done["kill"])
    return {**done, "ev": "done"}


def count_survivors(header: Mapping[str, Any]) -> int:
    """Return how many processes outlived the call's kill. A malformed report counts as one process."""
    kill = header.get("kill")
    if kill is None:
        return 0
    count = kill.get("survivors", 0) if isinstance(kill, dict) else 1
    return count if isinstance(count, int) else 1


def quote_text(text: object) -> str:
    """Return a guest's text, shortened and in printable ASCII, for a log or an error message."""
    return str(text)[:_QUOTE_CHARS].encode("unicode_escape").decode("ascii")[:_QUOTE_CHARS]


def _build_kill(kill: object) -> dict[str, Any] | None:
    if not isinstance(kill, dict) or kill.get("method") not in _KILL_METHODS:
        return None
    return {name: kill[name] for name in _KILL_FIELDS if name in kill}
