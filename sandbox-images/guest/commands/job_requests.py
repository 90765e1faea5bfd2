"""Requests about background jobs: start one, look at it, feed it, end it, list them all."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, MAX_BODY, Failure, check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_WAIT_MS = 10_000
_LABEL_CHARS = 200


class JobStartRequest:
    """Run a script that goes on when this request is answered, `wait_ms` after its start or at its end.

    It starts as a command of the session does, and leaves nothing to the next. `job` is given by PID 1.
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


class _OfJob:
    """What is asked of one job; its requests are served one after the other."""

    __slots__ = ("job", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        self.timeout_s = read_timeout(header)
        self.job = read_text(header, "job")[:_LABEL_CHARS]

    @property
    def lane(self) -> str:
        return f"job {self.job}"


class JobPollRequest(_OfJob):
    """What the job has printed since it was last asked, at most `max_bytes` of it: the head and the tail."""

    __slots__ = ("max_bytes",)

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "job", "max_bytes")
        super().__init__(header)
        self.max_bytes = read_whole(header, "max_bytes", 0, MAX_BODY)


class JobKillRequest(JobPollRequest):
    """End the job and all that it has started, and tell what it has printed."""

    __slots__ = ()


class JobInputRequest(_OfJob):
    """The body goes to the job's standard input, which is then closed, or not."""

    __slots__ = ("close",)

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "job", "close")
        super().__init__(header)
        self.close = header.get("close", False)
        if not isinstance(self.close, bool):
            raise Failure(INVALID_ARGUMENTS, "'close' must be true or false")


class JobListRequest:
    """Every job of the session."""

    lane = None
    __slots__ = ("timeout_s",)

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header)
        self.timeout_s = read_timeout(header)
