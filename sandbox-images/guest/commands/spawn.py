"""From an exec request to a running program: arguments, environment, working directory, posix_spawn."""

from __future__ import annotations

import errno
import os

from guest.failures import (
    INVALID_ARGUMENTS,
    MAX_BODY,
    SPAWN_FAILED,
    Failure,
    check_fields,
    describe_os_error,
    printable,
    read_text,
    read_timeout,
    read_whole,
)
from guest.paths import PROGRAMS, GuestPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

STREAM_STDERR_BYTES = 65_536
STATES = ("none", "use", "keep", "fresh")
_STREAMS = ("stdout", "stderr", "merged")


class ExecRequest:
    """Run one program.

    `caps` are the bytes kept of each stream; `stream_bytes` is None unless stdout is sent as it comes; `live_bytes` may
    be sent while the program runs, beside what is kept. `spill`: beyond how many bytes and lines the whole output goes
    to a file. `state`: whether a script starts from the session's shell state ("use"), leaves its own as well ("keep"),
    or starts without and leaves its own ("fresh"). `cwd` None: the session's folder.
    """

    __slots__ = (
        "argv",
        "caps",
        "cwd",
        "env",
        "live_bytes",
        "script_bytes",
        "spill",
        "state",
        "stream_bytes",
        "timeout_s",
    )

    def __init__(self, header: dict[str, Any]) -> None:
        check_fields(header, "argv", "script_bytes", "cwd", "env", "capture", "state", "spill", "live", "max_bytes")
        self.timeout_s = read_timeout(header)
        self.argv = _argv(header.get("argv"))
        self.script_bytes = read_whole(header, "script_bytes", 0, MAX_BODY, default=0)
        self.state = read_state(header)
        self.cwd = None if self.has_state and header.get("cwd") is None else read_text(header, "cwd")
        self.env = _environment(header.get("env"))
        self.stream_bytes: int | None = None
        self.caps: dict[str, int] = {}
        self._read_capture(header.get("capture"))
        self.spill = _spill(header.get("spill"))
        self.live_bytes = read_whole(header, "max_bytes", 0, None, default=0) if _flag(header, "live") else 0
        self._check_script(header)

    @property
    def has_state(self) -> bool:
        return self.state != "none"

    @property
    def keeps_state(self) -> bool:
        return self.state in ("keep", "fresh")

    @property
    def lane(self) -> str | None:
        """Commands that leave a state run one after the other."""
        return "shell" if self.keeps_state else None

    def _check_script(self, header: dict[str, Any]) -> None:
        if self.argv is not None and self.script_bytes:
            raise Failure(INVALID_ARGUMENTS, "'argv' and a script exclude each other")
        if self.has_state and (self.argv is not None or self.env):
            raise Failure(
                INVALID_ARGUMENTS,
                "with a 'state' neither 'argv' nor 'env' can be given: it is a script's, and has the environment",
            )
        if self.argv is None and self.script_bytes > read_whole(header, "body_bytes", 0, MAX_BODY):
            raise Failure(INVALID_ARGUMENTS, "'script_bytes' is more than the body has")

    def _read_capture(self, capture: object) -> None:
        if not isinstance(capture, dict):
            raise Failure(INVALID_ARGUMENTS, "'capture' must be an object")
        if set(capture) == {"stream"}:
            self.stream_bytes = read_whole(capture, "stream", 0, None)
            self.caps = {"stdout": 0, "stderr": STREAM_STDERR_BYTES}
        elif capture.keys() <= set(_STREAMS):
            self.caps = {name: read_whole(capture, name, 0, MAX_BODY, default=0) for name in _STREAMS}
        else:
            raise Failure(INVALID_ARGUMENTS, "'capture' has 'stream' alone, or 'stdout', 'stderr' and 'merged'")


def read_state(header: dict[str, Any]) -> str:
    state = header.get("state", "none")
    if state not in STATES:
        raise Failure(INVALID_ARGUMENTS, f"'state' must be one of {', '.join(STATES)}")
    return str(state)


def _flag(header: dict[str, Any], name: str) -> bool:
    value = header.get(name, False)
    if not isinstance(value, bool):
        raise Failure(INVALID_ARGUMENTS, f"{name!r} must be true or false")
    return value


def _spill(value: object) -> tuple[int, int] | None:
    """Bytes and lines of output up to which there is no file."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"bytes", "lines"}:
        raise Failure(INVALID_ARGUMENTS, "'spill' must be null or an object of 'bytes' and 'lines'")
    return read_whole(value, "bytes", 0, MAX_BODY), read_whole(value, "lines", 0, None)


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


MAX_ARGUMENT_BYTES = 131_071
"""What the kernel takes as one argument, without its NUL."""
BASH = (*PROGRAMS["bash"], b"--noprofile", b"--norc", b"-c")
# Above all that a supervisor has open.
_SPARE_FD = 200

# SIGKILL and SIGSTOP cannot be set; 32 and 33 are the C library's own.
_SIGNALS = tuple(number for number in range(1, 65) if number not in (9, 19, 32, 33))


def encode_text(text: str, what: str) -> bytes:
    """The bytes of a name or argument. Raises Failure for what cannot be one."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Failure(INVALID_ARGUMENTS, f"{what} has a character that cannot be encoded") from None


def build_argv(request: ExecRequest, script: bytes) -> list[bytes]:
    if request.argv is None:
        if len(script) > MAX_ARGUMENT_BYTES:
            raise Failure(
                INVALID_ARGUMENTS,
                f"the script has {len(script)} bytes, more than {MAX_ARGUMENT_BYTES}: write it to a file and run the "
                "file",
            )
        return build_bash_argv(script)
    argv = [encode_text(part, "an argument") for part in request.argv]
    longest = max(len(part) for part in argv)
    if longest > MAX_ARGUMENT_BYTES:
        raise Failure(INVALID_ARGUMENTS, f"an argument has {longest} bytes, more than {MAX_ARGUMENT_BYTES}")
    return argv


def build_bash_argv(script: bytes) -> list[bytes]:
    """Raises Failure for a script that no bash could run."""
    if b"\0" in script:
        raise Failure(INVALID_ARGUMENTS, "the script has a NUL byte")
    # The last is the script's own name, $0, in front of what bash complains about.
    return [*BASH, script, b"bash"]


def build_environment(request: ExecRequest, paths: GuestPaths) -> dict[bytes, bytes]:
    merged = {**paths.environment, **request.env}
    return {encode_text(name, "env"): encode_text(value, "env") for name, value in merged.items()}


def enter_directory(path: str, workspace: bytes) -> None:
    """Make `path` this process's working directory: posix_spawn has no such step. Raises Failure."""
    target = os.path.join(workspace, encode_text(path, "'cwd'"))
    try:
        os.chdir(target)
    except OSError as error:
        raise describe_os_error(error, f"cwd {printable(target)}") from None


def spawn(
    argv: list[bytes], env: dict[bytes, bytes], stdin: int, stdout: int, stderr: int, further: Sequence[int] = ()
) -> int:
    """Start a program in a session of its own, with these descriptors and no other. Raises Failure."""
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    # First out of the way of each other, and last: until here a number may be one of the others'.
    actions += [(os.POSIX_SPAWN_DUP2, fd, _SPARE_FD + at) for at, fd in enumerate(further)]
    for at in range(len(further)):
        actions += [(os.POSIX_SPAWN_DUP2, _SPARE_FD + at, 3 + at), (os.POSIX_SPAWN_CLOSE, _SPARE_FD + at)]
    program = _find_program(argv[0], env.get(b"PATH", b""))
    try:
        return os.posix_spawn(program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_SIGNALS)
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise Failure(INVALID_ARGUMENTS, "arguments and environment are too large together") from None
        if program == BASH[0] and error.errno == errno.ENOENT:
            # The same path for every shell of the session: when it is not there, the image has none.
            message = (
                "the image of this sandbox has no /bin/bash, so no command can run; the file and search tools work "
                "without it"
            )
            raise Failure(SPAWN_FAILED, message) from None
        reason = os.strerror(error.errno or 0).lower()
        raise Failure(SPAWN_FAILED, f"{printable(argv[0][:200])} could not be started: {reason}") from None


def _find_program(name: bytes, search_path: bytes) -> bytes:
    if b"/" in name:
        return name
    for directory in search_path.split(b":"):
        candidate = os.path.join(directory or b".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise Failure(SPAWN_FAILED, f"{printable(name[:200])} could not be started: not found in PATH")
