"""The table of the host's requests: for each `op`, the class that parses the header."""

from __future__ import annotations

from guest.commands.exec_request import ExecRequest
from guest.commands.job_requests import JOB_REQUESTS
from guest.failures import MAX_BODY
from guest.fields import read_whole
from guest.files.requests import EditTextRequest, ReadFileRequest, ReadTextRequest, WriteFileRequest, WriteTextRequest
from guest.search.requests import GlobRequest, GrepRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeGuard

    from guest.fields import GuestRequest

REQUESTS: dict[str, type[GuestRequest]] = {
    **JOB_REQUESTS,
    **{
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
        )
    },
}
_HEX = frozenset("0123456789abcdef")


def parse_body_bytes(header: dict[str, Any]) -> int:
    """Return the declared size of a call's body, in bytes. Raises RequestFailure(INVALID_ARGUMENTS)."""
    return read_whole(header, "body_bytes", 0, MAX_BODY)


def is_request_id(value: object) -> TypeGuard[str]:
    """Return whether the value is a request id: 32 lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)
