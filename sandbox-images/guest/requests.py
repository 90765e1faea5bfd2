"""Requests of the host by their op: what reads each from its header, and what serves it."""

from __future__ import annotations

from guest.commands.job_requests import JobInputRequest, JobKillRequest, JobListRequest, JobPollRequest, JobStartRequest
from guest.commands.spawn import ExecRequest
from guest.failures import MAX_BODY, read_whole
from guest.files.requests import EditTextRequest, ReadFileRequest, ReadTextRequest, WriteFileRequest, WriteTextRequest
from guest.search.requests import GlobRequest, GrepRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeGuard

    from guest.supervisor_channel import RequestContext

    FileRequest = ReadTextRequest | ReadFileRequest | WriteFileRequest | WriteTextRequest | EditTextRequest
    JobRequest = JobStartRequest | JobPollRequest | JobInputRequest | JobListRequest
    SearchRequest = GlobRequest | GrepRequest
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

# By name, because PID 1 never serves one: a supervisor loads what it needs, and PID 1 stays small.
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
    """The request of a header whose op is one of CALL_OPS. Raises Failure(INVALID_ARGUMENTS)."""
    return _REQUESTS[header["op"]](header)


def load_server(request: object) -> Callable[[Any, RequestContext], dict[str, object]]:
    """The function that serves a request: (request, context) -> the fields of its done event. It raises Failure and
    OSError.
    """
    module, function = _SERVERS[type(request)]
    server: Callable[[Any, RequestContext], dict[str, object]] = getattr(
        __import__(module, fromlist=(function,)), function
    )
    return server


def parse_body_bytes(header: dict[str, Any]) -> int:
    """The declared size of a call's body. Raises Failure(INVALID_ARGUMENTS)."""
    return read_whole(header, "body_bytes", 0, MAX_BODY)


def is_request_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)
