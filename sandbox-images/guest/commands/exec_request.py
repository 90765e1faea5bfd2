"""The request that runs a program."""

from __future__ import annotations

from guest.failures import INVALID_ARGUMENTS, MAX_BODY, RequestFailure
from guest.fields import GuestRequest, choice, optional, read_flag, read_text, read_variables, read_whole, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

STREAM_STDERR_BYTES = 65_536
_STREAMS = ("stdout", "stderr", "merged")


def read_argv(header: dict[str, Any], name: str) -> list[str]:
    """Return the program and its arguments. Raises RequestFailure."""
    value = header.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
        raise RequestFailure(INVALID_ARGUMENTS, "'argv' must be a list of strings, not empty")
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


class ExecRequest(GuestRequest):
    """Run one program.

    `caps`: the number of bytes to return of each stream. `stream_bytes`: limit of stdout that is sent as it arrives, or
    None. `live_bytes`: limit of the output that is sent while the program runs, in addition to the returned output.
    `spill`: (bytes, lines) above which the whole output is written to a file.

    `state`: "none", "use", "keep" or "fresh". With "use" a script starts from the session's shell state. With "keep"
    the script also stores its own state. With "fresh" the script starts without a state and stores its own. `cwd` None:
    the session's folder.
    """

    OP: ClassVar = "exec"
    FIELDS: ClassVar = {
        "argv": optional(read_argv),
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
