"""Access to programs and files of a sandbox with the rights of one of its users. Every access uses the Python of the
toolkit that every sandbox has, and needs no program of the image. Only root of a sandbox can change the user.
"""

import errno
import os

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.calls import ExecResult as Done
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.sessions.session import Session

OWN = ""
"""The user as which programs in the sandbox run if no other user is given."""
_PART_BYTES = 4 * 1024 * 1024
"""Limit of the output of a program that a worker reads, in bytes."""
_FILE_TIMEOUT_S = 120.0
_SCRIPT = """
import os, pwd, sys
name, action, *arguments = sys.argv[1:]
try:
    user = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name) if name else None
except KeyError:
    sys.exit(f"unable to find user {name}")
try:
    if action == "give":
        os.chown(arguments[0], user.pw_uid, user.pw_gid)
        sys.exit()
    if user is not None:
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        os.environ["HOME"] = user.pw_dir
    if action == "run":
        os.execvp(arguments[0], arguments)
    elif action == "read":
        with open(arguments[0], "rb") as file:
            file.seek(int(arguments[1]))
            sys.stdout.buffer.write(file.read(int(arguments[2])))
    else:
        os.makedirs(os.path.dirname(arguments[0]), exist_ok=True)
        with open(arguments[0], "wb") as file:
            while part := sys.stdin.buffer.read(1 << 20):
                file.write(part)
except OSError as error:
    print(error.errno if action != "run" else f"{arguments[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(126 if isinstance(error, PermissionError) else 127)
"""


def run_as(user: str, command: list[str]) -> list[str]:
    """Return the command that runs a command as that user. The exit codes are the same as in a shell: 126 for a program
    that the user may not start, 127 for a missing program. Exit code 1 means that the user does not exist.
    """
    return command if user == OWN else _call(user, "run", *command)


async def give_workspace(session: Session, user: str) -> None:
    """Make a user the owner of /workspace. Raises ToolFailure when the user does not exist."""
    _check(await session.exec(_call(user, "give", "/workspace")), "/workspace")


async def read_as(session: Session, user: str, path: str) -> bytes:
    """Return the content of a file, read with the rights of `user`. Raises OSError, with EFBIG above 64 MiB, and
    ToolFailure.
    """
    content = b""
    while len(content) <= MAX_BLOB_BYTES:
        command = _call(user, "read", path, str(len(content)), str(_PART_BYTES))
        part = _check(await session.exec(command, timeout_s=_FILE_TIMEOUT_S), path).stdout
        content += part
        if len(part) < _PART_BYTES:
            return content
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)


async def write_as(session: Session, user: str, path: str, content: bytes) -> None:
    """Write a file with the rights of `user`, not atomically, and create missing folders. Raises OSError and
    ToolFailure.
    """
    command = _call(user, "write", path)
    _check(await session.exec(command, stdin=content, timeout_s=_FILE_TIMEOUT_S), path)


def _call(user: str, action: str, *arguments: str) -> list[str]:
    return ["/opt/toolcrew/bin/python3", "-IS", "-c", _SCRIPT, user, action, *arguments]


def _check(done: Done, path: str) -> Done:
    if done.timed_out:
        raise ToolFailure(
            ErrorCode.TIMEOUT, f"{path} was not read or written within {_FILE_TIMEOUT_S:g} s: use a smaller file"
        )
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        if message.isdecimal():
            raise OSError(int(message), os.strerror(int(message)), path)
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{path}: {message or 'the sandbox ended the program'}")
    return done
