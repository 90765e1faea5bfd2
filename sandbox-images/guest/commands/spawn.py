"""From an exec request to a running program: arguments, environment, working directory, posix_spawn."""

from __future__ import annotations

import errno
import os

from guest.failures import INVALID_ARGUMENTS, SPAWN_FAILED, Failure, describe_os_error, printable
from guest.paths import PROGRAMS, GuestPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from guest.commands.exec_requests import ExecRequest

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
