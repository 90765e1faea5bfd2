"""Requests about background jobs: start, poll, send input, kill, and list."""

from __future__ import annotations

from guest.failures import MAX_BODY
from guest.fields import GuestRequest, optional, read_flag, read_script_bytes, read_text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

_MAX_WAIT_MS = 10_000
_LABEL_CHARS = 200
RUNNING, EXITED, KILLED, LOST = "running", "exited", "killed", "lost"
"""States of a job. LOST: a program of the sandbox has killed the keeper, and PID 1 has killed the job's processes."""


def _read_label(header: dict[str, Any], name: str) -> str:
    return read_text(header, name)[:_LABEL_CHARS]


class JobStartRequest(GuestRequest):
    """Request to run a script in the background.

    The answer comes `wait_ms` after the start of the script, or when the script ends before. The script starts from the
    session's shell state and stores no state. PID 1 sets `job`.
    """

    OP: ClassVar = "job_start"
    FIELDS: ClassVar = {
        "script_bytes": read_script_bytes,
        "cwd": optional(read_text),
        "label": _read_label,
        "wait_ms": whole(0, _MAX_WAIT_MS, default=0),
        "max_bytes": whole(0, MAX_BODY),
    }
    script_bytes: int
    cwd: str | None
    label: str
    wait_ms: int
    max_bytes: int
    job = ""


class _JobRequest(GuestRequest):
    """A request about one job. The requests about a job run one after the other."""

    job: str

    @property
    def lane(self) -> str:
        """Return the lane of the job."""
        return f"job {self.job}"


class JobPollRequest(_JobRequest):
    """Request for the job's output since the last request: at most `max_bytes`, as head and tail."""

    OP: ClassVar = "job_poll"
    FIELDS: ClassVar = {"job": _read_label, "max_bytes": whole(0, MAX_BODY)}
    max_bytes: int


class JobKillRequest(JobPollRequest):
    """Request to kill the job and everything that it has started. The answer has the output since the last request."""

    OP: ClassVar = "job_kill"


class JobInputRequest(_JobRequest):
    """Request to write the body to the job's standard input. With `close`, the input is closed afterwards."""

    OP: ClassVar = "job_input"
    FIELDS: ClassVar = {"job": _read_label, "close": read_flag}
    close: bool


class JobListRequest(GuestRequest):
    """Request for a list of the session's jobs."""

    OP: ClassVar = "job_list"


JOB_REQUESTS: dict[str, type[GuestRequest]] = {
    request.OP: request
    for request in (JobStartRequest, JobPollRequest, JobInputRequest, JobKillRequest, JobListRequest)
}
