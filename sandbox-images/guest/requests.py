"""The table of the host's requests: for each `op`, the class that parses the header."""

from __future__ import annotations

from guest.commands.exec_request import ExecRequest
from guest.commands.job_requests import JOB_REQUESTS
from guest.files.requests import EditTextRequest, ReadFileRequest, ReadTextRequest, WriteFileRequest, WriteTextRequest
from guest.search.requests import GlobRequest, GrepRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
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
