"""The request that runs a program."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure
from guest.fields import MAX_BODY, check_fields, read_text, read_timeout, read_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STREAM_STDERR_BYTES = 65_536


class ExecRequest:
    """Run one program. `caps` are the bytes kept of each stream; `stream_bytes` is None unless stdout is sent as it comes."""

    __slots__ = ("argv", "caps", "cwd", "env", "script_bytes", "stream_bytes", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "argv", "script_bytes", "cwd", "env", "capture")
        self.timeout_s = read_timeout(header)
        self.argv = _argv(header.get("argv"))
        self.script_bytes = read_whole(header, "script_bytes", 0, MAX_BODY, default=0)
        self.cwd = read_text(header, "cwd")
        self.env = _environment(header.get("env"))
        self.stream_bytes: int | None = None
        self.caps: dict[str, int] = {}
        self._read_capture(header.get("capture"))
        if self.argv is not None and self.script_bytes:
            raise Failure(INVALID_ARGUMENTS, "'argv' and a script exclude each other")
        if self.argv is None and self.script_bytes > read_whole(header, "body_bytes", 0, MAX_BODY):
            raise Failure(INVALID_ARGUMENTS, "'script_bytes' is more than the body has")

    def _read_capture(self, capture: object) -> None:
        if not isinstance(capture, dict):
            raise Failure(INVALID_ARGUMENTS, "'capture' must be an object")
        if set(capture) == {"stream"}:
            self.stream_bytes = read_whole(capture, "stream", 0, None)
            self.caps = {"stdout": 0, "stderr": STREAM_STDERR_BYTES}
        elif capture.keys() <= {"stdout", "stderr", "merged"}:
            self.caps = {name: read_whole(capture, name, 0, MAX_BODY, default=0) for name in ("stdout", "stderr", "merged")}
        else:
            raise Failure(INVALID_ARGUMENTS, "'capture' has 'stream' alone, or 'stdout', 'stderr' and 'merged'")


def _argv(value: object) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
        raise Failure(INVALID_ARGUMENTS, "'argv' must be null or a list of strings, not empty")
    if not value[0] or any("\0" in part for part in value):
        raise Failure(INVALID_ARGUMENTS, "'argv' has a NUL byte or names no program")
    return value


def _environment(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Failure(INVALID_ARGUMENTS, "'env' must be an object of strings")
    for name, text in value.items():
        if not name or "=" in name or "\0" in name or "\0" in text:
            raise Failure(INVALID_ARGUMENTS, f"{name!a} cannot be an environment variable")
    return value
