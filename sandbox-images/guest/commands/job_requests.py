"""Requests about background jobs: start, poll, send input, kill, and list."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, MAX_BODY, Failure, check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_WAIT_MS = 10_000
_LABEL_CHARS = 200


class JobStartRequest:
    """Run a script in the background.

    The request is answered `wait_ms` after the start of the script, or at its end. The script starts from the
    session's shell state and stores no state. PID 1 sets `job`.
    """

    lane = None
    __slots__ = ("cwd", "job", "label", "max_bytes", "script_bytes", "timeout_s", "wait_s")

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "script_bytes", "cwd", "label", "wait_ms", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.script_bytes = read_whole(header, "script_bytes", 1, MAX_BODY)
        if self.script_bytes > read_whole(header, "body_bytes", 0, MAX_BODY):
            raise Failure(INVALID_ARGUMENTS, "'script_bytes' is more than the body has")
        self.cwd = read_text(header, "cwd") if header.get("cwd") is not None else None
        self.label = read_text(header, "label")[:_LABEL_CHARS]
        self.wait_s = read_whole(header, "wait_ms", 0, _MAX_WAIT_MS, default=0) / 1000
        self.max_bytes = read_whole(header, "max_bytes", 0, MAX_BODY)
        self.job = ""


class _JobRequest:
    """A request about one job. The requests about a job run one after the other."""

    __slots__ = ("job", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        self.timeout_s = read_timeout(header)
        self.job = read_text(header, "job")[:_LABEL_CHARS]

    @property
    def lane(self) -> str:
        """Return the lane of the job."""
        return f"job {self.job}"


class JobPollRequest(_JobRequest):
    """Return the job's output since the last request, at most `max_bytes`, as head and tail."""

    __slots__ = ("max_bytes",)

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "job", "max_bytes")
        super().__init__(header)
        self.max_bytes = read_whole(header, "max_bytes", 0, MAX_BODY)


class JobKillRequest(JobPollRequest):
    """Kill the job and everything that the job has started. Return the output since the last request."""

    __slots__ = ()


class JobInputRequest(_JobRequest):
    """Write the body to the job's standard input. With `close`, close the input afterwards."""

    __slots__ = ("close",)

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "job", "close")
        super().__init__(header)
        self.close = header.get("close", False)
        if not isinstance(self.close, bool):
            raise Failure(INVALID_ARGUMENTS, "'close' must be true or false")


class JobListRequest:
    """List every job of the session."""

    lane = None
    __slots__ = ("timeout_s",)

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header)
        self.timeout_s = read_timeout(header)
