"""Requests of the host, read from frame headers: field by field, an unknown field is refused."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeGuard

MAX_BODY = 67_108_864
STREAM_STDERR_BYTES = 65_536
CALL_OPS = ("exec", "read_lines", "read_file", "write_file")
_HEX = frozenset("0123456789abcdef")
_COMMON = frozenset(("id", "op", "body_bytes", "timeout_s"))


class ExecRequest:
    """Run one program. `caps` are the bytes kept of each stream; `stream_bytes` is None unless stdout is sent as it comes."""

    __slots__ = ("argv", "caps", "cwd", "env", "script_bytes", "stream_bytes", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        _check_fields(header, "argv", "script_bytes", "cwd", "env", "capture")
        self.timeout_s = _timeout(header)
        self.argv = _argv(header.get("argv"))
        self.script_bytes = _whole(header, "script_bytes", 0, MAX_BODY, default=0)
        self.cwd = _text(header, "cwd")
        self.env = _environment(header.get("env"))
        self.stream_bytes: int | None = None
        self.caps: dict[str, int] = {}
        self._read_capture(header.get("capture"))
        if self.argv is not None and self.script_bytes:
            raise Failure(INVALID_ARGUMENTS, "'argv' and a script exclude each other")
        if self.argv is None and self.script_bytes > _whole(header, "body_bytes", 0, MAX_BODY):
            raise Failure(INVALID_ARGUMENTS, "'script_bytes' is more than the body has")

    def _read_capture(self, capture: object) -> None:
        if not isinstance(capture, dict):
            raise Failure(INVALID_ARGUMENTS, "'capture' must be an object")
        if set(capture) == {"stream"}:
            self.stream_bytes = _whole(capture, "stream", 0, None)
            self.caps = {"stdout": 0, "stderr": STREAM_STDERR_BYTES}
        elif capture.keys() <= {"stdout", "stderr", "merged"}:
            self.caps = {name: _whole(capture, name, 0, MAX_BODY, default=0) for name in ("stdout", "stderr", "merged")}
        else:
            raise Failure(INVALID_ARGUMENTS, "'capture' has 'stream' alone, or 'stdout', 'stderr' and 'merged'")


class ReadLinesRequest:
    """Lines `offset` to `offset + limit - 1` of a file, at most `max_bytes` of them."""

    __slots__ = ("limit", "max_bytes", "offset", "path", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        _check_fields(header, "path", "offset", "limit", "max_bytes")
        self.timeout_s = _timeout(header)
        self.path = _text(header, "path")
        self.offset = _whole(header, "offset", 1, None)
        self.limit = _whole(header, "limit", 1, None)
        self.max_bytes = _whole(header, "max_bytes", 0, None)


class ReadFileRequest:
    """A whole file of at most `max_bytes`."""

    __slots__ = ("max_bytes", "path", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        _check_fields(header, "path", "max_bytes")
        self.timeout_s = _timeout(header)
        self.path = _text(header, "path")
        self.max_bytes = _whole(header, "max_bytes", 0, None)


class WriteFileRequest:
    """The body becomes a file's content, or its end."""

    __slots__ = ("mode", "path", "timeout_s")

    def __init__(self, header: dict[str, Any]) -> None:
        _check_fields(header, "path", "mode")
        self.timeout_s = _timeout(header)
        self.path = _text(header, "path")
        self.mode = header.get("mode")
        if self.mode not in ("overwrite", "append", "create"):
            raise Failure(INVALID_ARGUMENTS, "'mode' must be 'overwrite', 'append' or 'create'")


if TYPE_CHECKING:
    CallRequest = ExecRequest | ReadLinesRequest | ReadFileRequest | WriteFileRequest

_REQUESTS: dict[str, type[CallRequest]] = {
    "exec": ExecRequest,
    "read_lines": ReadLinesRequest,
    "read_file": ReadFileRequest,
    "write_file": WriteFileRequest,
}


def parse_call(header: dict[str, Any]) -> CallRequest:
    """The request of a header whose op is one of CALL_OPS. Raises Failure(INVALID_ARGUMENTS)."""
    return _REQUESTS[header["op"]](header)


def parse_body_bytes(header: dict[str, Any]) -> int:
    """The declared size of a call's body. Raises Failure(INVALID_ARGUMENTS)."""
    return _whole(header, "body_bytes", 0, MAX_BODY)


def is_request_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)


def _check_fields(header: dict[str, Any], *names: str) -> None:
    unknown = header.keys() - _COMMON - set(names)
    if unknown:
        raise Failure(INVALID_ARGUMENTS, f"unknown field {min(unknown)!a}")


def _whole(header: dict[str, Any], name: str, least: int, most: int | None, default: int | None = None) -> int:
    value = header.get(name, default)
    # bool is an int in Python, and JSON's true is no number.
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be a whole number {bounds}")
    return value


def _timeout(header: dict[str, Any]) -> float:
    value = header.get("timeout_s")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise Failure(INVALID_ARGUMENTS, "'timeout_s' must be a number above 0")
    return float(value)


def _text(header: dict[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be a string, not empty and without NUL")
    return value


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
