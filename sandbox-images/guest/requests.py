"""The table of the host's requests: for each `op`, the class that parses the header and the function that serves the
request.
"""

from __future__ import annotations

from guest.commands.job_requests import JobInputRequest, JobKillRequest, JobListRequest, JobPollRequest, JobStartRequest
from guest.failures import INVALID_ARGUMENTS, MAX_BODY, RequestFailure
from guest.fields import GuestRequest, choice, optional, read_flag, read_text, read_whole, whole
from guest.files.requests import EditTextRequest, ReadFileRequest, ReadTextRequest, WriteFileRequest, WriteTextRequest
from guest.search.requests import GlobRequest, GrepRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar, TypeGuard

    from guest.supervisors import RequestContext

    FileRequest = ReadTextRequest | ReadFileRequest | WriteFileRequest | WriteTextRequest | EditTextRequest
    JobRequest = JobStartRequest | JobPollRequest | JobInputRequest | JobListRequest
    SearchRequest = GlobRequest | GrepRequest

STREAM_STDERR_BYTES = 65_536
_STREAMS = ("stdout", "stderr", "merged")


def _read_argv(header: dict[str, Any], name: str) -> list[str]:
    value = header[name]
    if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
        raise RequestFailure(INVALID_ARGUMENTS, "'argv' must be null or a list of strings, not empty")
    if not value[0] or any("\0" in part for part in value):
        raise RequestFailure(INVALID_ARGUMENTS, "'argv' has a NUL byte or names no program")
    return value


def _read_spill(header: dict[str, Any], name: str) -> tuple[int, int]:
    value = header[name]
    if not isinstance(value, dict) or set(value) != {"bytes", "lines"}:
        raise RequestFailure(INVALID_ARGUMENTS, "'spill' must be null or an object of 'bytes' and 'lines'")
    return read_whole(value, "bytes", 0, MAX_BODY), read_whole(value, "lines", 0, None)


def _read_capture(header: dict[str, Any], name: str) -> tuple[int | None, dict[str, int]]:
    """Read the field `capture`. Return the limit of stdout if it is streamed (otherwise None), and the number of bytes
    to return of each stream.
    """
    capture = header.get(name)
    if not isinstance(capture, dict):
        raise RequestFailure(INVALID_ARGUMENTS, "'capture' must be an object")
    if set(capture) == {"stream"}:
        return read_whole(capture, "stream", 0, None), {"stdout": 0, "stderr": STREAM_STDERR_BYTES}
    if capture.keys() <= set(_STREAMS):
        return None, {stream: read_whole(capture, stream, 0, MAX_BODY, default=0) for stream in _STREAMS}
    raise RequestFailure(INVALID_ARGUMENTS, "'capture' has 'stream' alone, or 'stdout', 'stderr' and 'merged'")


def read_variables(header: dict[str, Any], name: str) -> dict[str, str]:
    """Return the environment variables in a field of a header; none when it is missing. Raises RequestFailure when a
    variable is invalid.
    """
    value = header.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be an object of strings")
    for variable, text in value.items():
        if not variable or "=" in variable or "\0" in variable or "\0" in text:
            raise RequestFailure(INVALID_ARGUMENTS, f"{variable!a} cannot be an environment variable")
    return value


class ExecRequest(GuestRequest):
    """Run one program.

    `caps`: the number of bytes to return of each stream. `stream_bytes`: limit of stdout that is sent as it arrives, or
    None. `live_bytes`: limit of the output that is sent while the program runs, in addition to the returned output.
    `spill`: (bytes, lines) above which the whole output is written to a file.

    `state`: "none", "use", "keep" or "fresh". With "use" a script starts from the session's shell state. With "keep"
    the script also stores its own state. With "fresh" the script starts without a state and stores its own. `cwd` None:
    the session's folder.
    """

    FIELDS: ClassVar = {
        "argv": optional(_read_argv),
        "script_bytes": whole(0, MAX_BODY, default=0),
        "state": choice("none", "use", "keep", "fresh", default="none"),
        "cwd": optional(read_text),
        "env": read_variables,
        "capture": _read_capture,
        "spill": optional(_read_spill),
        "live": read_flag,
        "max_bytes": whole(0, default=0),
    }
    argv: list[str] | None
    script_bytes: int
    state: str
    cwd: str | None
    env: dict[str, str]
    capture: tuple[int | None, dict[str, int]]
    spill: tuple[int, int] | None
    live: bool
    max_bytes: int

    def __init__(self, header: dict[str, Any]) -> None:
        super().__init__(header)
        self.stream_bytes, self.caps = self.capture
        self.live_bytes = self.max_bytes if self.live else 0
        if self.cwd is None and not self.has_state:
            raise RequestFailure(INVALID_ARGUMENTS, "'cwd' is missing")
        if self.argv is not None and self.script_bytes:
            raise RequestFailure(INVALID_ARGUMENTS, "'argv' and a script cannot be combined")
        if self.has_state and (self.argv is not None or self.env):
            raise RequestFailure(
                INVALID_ARGUMENTS,
                "'argv' and 'env' cannot be combined with 'state', which is for scripts and contains the environment",
            )
        if self.argv is None and self.script_bytes > read_whole(header, "body_bytes", 0, MAX_BODY):
            raise RequestFailure(INVALID_ARGUMENTS, "'script_bytes' is larger than the body")

    @property
    def has_state(self) -> bool:
        """Return whether the script uses or stores the session's shell state."""
        return self.state != "none"

    @property
    def keeps_state(self) -> bool:
        """Return whether the script stores its shell state."""
        return self.state in ("keep", "fresh")

    @property
    def lane(self) -> str | None:
        """Return "shell" when the command stores a state, else None. Commands of a lane run one after the other."""
        return "shell" if self.keeps_state else None


if TYPE_CHECKING:
    CallRequest = JobRequest | ExecRequest | FileRequest | SearchRequest

_REQUESTS: dict[str, type[CallRequest]] = {
    "exec": ExecRequest,
    "job_start": JobStartRequest,
    "job_poll": JobPollRequest,
    "job_input": JobInputRequest,
    "job_kill": JobKillRequest,
    "job_list": JobListRequest,
    "read_text": ReadTextRequest,
    "read_file": ReadFileRequest,
    "write_file": WriteFileRequest,
    "write_text": WriteTextRequest,
    "edit_text": EditTextRequest,
    "glob": GlobRequest,
    "grep": GrepRequest,
}
CALL_OPS = frozenset(_REQUESTS)

# Name modules as text and import them in the supervisors: PID 1 serves no request and must stay small.
_SERVERS: dict[type[object], tuple[str, str]] = {
    ReadTextRequest: ("guest.files.text_reads", "read_text"),
    ReadFileRequest: ("guest.files.file_reads", "read_file"),
    WriteFileRequest: ("guest.files.file_writes", "write_file"),
    WriteTextRequest: ("guest.files.text_writes", "write_text"),
    EditTextRequest: ("guest.files.edits", "edit_text"),
    GlobRequest: ("guest.search.glob_search", "glob"),
    GrepRequest: ("guest.search.grep_search", "grep"),
}
_HEX = frozenset("0123456789abcdef")


def parse_call(header: dict[str, Any]) -> CallRequest:
    """Return the request for a header. The op must be in CALL_OPS. Raises RequestFailure(INVALID_ARGUMENTS)."""
    return _REQUESTS[header["op"]](header)


def load_server(request: object) -> Callable[[Any, RequestContext], dict[str, object]]:
    """Return the function that serves a request: (request, context) -> the fields of its done event.

    The function raises RequestFailure and OSError.
    """
    module, function = _SERVERS[type(request)]
    server: Callable[[Any, RequestContext], dict[str, object]] = getattr(
        __import__(module, fromlist=(function,)), function
    )
    return server


def parse_body_bytes(header: dict[str, Any]) -> int:
    """Return the declared size of a call's body, in bytes. Raises RequestFailure(INVALID_ARGUMENTS)."""
    return read_whole(header, "body_bytes", 0, MAX_BODY)


def is_request_id(value: object) -> TypeGuard[str]:
    """Return whether the value is a request id: 32 lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)
