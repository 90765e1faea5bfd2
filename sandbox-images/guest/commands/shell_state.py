"""The state of a session's shells: each command starts with the folder, exported variables and functions that the last
one left.

The shell writes them itself as it ends. A shell gets them by BASH_ENV, a script it runs before its own. Whatever the
files hold was written by programs of the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from guest.failures import PATH_NOT_ALLOWED, Failure, printable
from guest.paths import ENVIRONMENT, GuestPaths
from guest.processes import BASH, MAX_ARGUMENT_BYTES, build_bash_argv, enter_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.requests import ExecRequest

_MAX_PATH = 4096
MAX_STATE_BYTES = 262_144
PREAMBLE_FD = 3
_RUN_LONG = b'eval "$BASH_EXECUTION_STRING"'
SCRIPT_FD = 4
_END = b"end"
_MAX_STATUSES = 64
# An EXIT trap, run by builtins alone: nothing is forked. What the script traces or traps goes into the file, in front
# of the first NUL. No variable: any name may be the script's, readonly or a reference to another.
_SAVE = """{{ builtin set -- "${{PIPESTATUS[@]}}"; builtin trap - DEBUG ERR; builtin trap "" XFSZ; builtin set +exu
builtin printf "\\0"; builtin printf "%s " "$@"; builtin printf "\\0"; builtin pwd -P; builtin printf "\\0"
builtin export -n PWD; builtin declare -px; builtin printf "\\0"; builtin declare -f
builtin printf "\\0"; builtin declare -F
builtin printf "\\0%s" {token}; }} 2>/dev/null >|{next}"""
_FIELDS = 7
# What bash writes of a variable whose value has nothing to be quoted.
_PLAIN_VARIABLE = re.compile(rb'declare -x ([A-Z_]+)="([^"\\$`]*)"')
_OUR_NAMES = frozenset(name.encode() for name in ENVIRONMENT)
# Every shell has these of its own: the folder it came from while there is none, and how deep it is.
_OWN_VARIABLES = (b"declare -x OLDPWD", b"declare -x SHLVL=")


def read_folder(paths: GuestPaths) -> bytes:
    """Where relative paths start: what the last command left as its directory, at first the workspace."""
    folder = read_state_file(paths, b"folder", _MAX_PATH)
    return folder if folder is not None and folder.startswith(b"/") and b"\0" not in folder else paths.workspace


def write_state_file(paths: GuestPaths, name: bytes, content: bytes) -> None:
    """Write a file of the state, whole or not at all. Raises OSError."""
    temporary = paths.state + b"/." + name
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    os.rename(temporary, paths.state + b"/" + name)


def read_state_file(paths: GuestPaths, name: bytes, most: int) -> bytes | None:
    """At most that many bytes of a file of the state; None when it is missing or is no regular file: a pipe would never
    end.
    """
    try:
        fd = os.open(
            paths.state + b"/" + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        parts, left = [], min(status.st_size, most)
        while left > 0 and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)


NONE, KEPT, REPLACED, TOO_LARGE, NO_ROOM = "none", "kept", "replaced", "too_large", "no_room"


class ShellState:
    """What a shell starts with: `environment` as it is handed to a program; `variables` and `functions` in bash's own
    words.

    `raw`: the file it came from, None where there was none.
    """

    __slots__ = ("environment", "functions", "raw", "variables")

    def __init__(
        self, environment: dict[bytes, bytes], variables: bytes, functions: bytes, raw: bytes | None = None
    ) -> None:
        self.raw = raw
        self.environment = environment
        self.variables = variables
        self.functions = functions


class StateOutcome:
    """What became of a shell's state. `outcome`: one of the words above.

    `folder`: the session's from now on; `moved`: it is another than before. `stray`: where the shell ended when that
    cannot be kept, "" for a folder that is gone. `statuses`: of the members of its last pipeline, None when the shell
    did not tell.
    """

    __slots__ = ("folder", "moved", "outcome", "statuses", "stray")

    def __init__(self, folder: bytes, outcome: str = REPLACED) -> None:
        self.outcome = outcome
        self.folder = folder
        self.moved = False
        self.stray: bytes | None = None
        self.statuses: list[int] | None = None


def load_state(paths: GuestPaths) -> ShellState:
    """What the last shell left, or what a new session has when there is nothing, or nothing that holds together."""
    raw = read_state_file(paths, b"shell", MAX_STATE_BYTES)
    parts = raw.split(b"\0") if raw is not None else []
    if len(parts) != 3 or parts[2] != _END:
        return ShellState({name.encode(): value.encode() for name, value in paths.environment.items()}, b"", b"")
    environment, variables = _split_variables(parts[0])
    if b"PATH" not in environment:
        # A shell that is started without one makes up its own.
        variables = b"builtin unset -v PATH\n" + variables
    return ShellState(environment, variables, parts[1], raw)


def _split_variables(text: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """Those that can be handed over as they are, which costs a shell nothing, and those that it has to read.

    Only names of our own environment: bash takes others, like IFS, for something else when it finds them there.
    """
    environment, rest = {}, []
    for line in text.splitlines(keepends=True):
        plain = _PLAIN_VARIABLE.fullmatch(line.rstrip(b"\n"))
        if plain is not None and plain[1] in _OUR_NAMES:
            environment[plain[1]] = plain[2]
        elif line.rstrip(b"\n") != _OWN_VARIABLES[0] and not line.startswith(_OWN_VARIABLES[1]):
            rest.append(line)
    return environment, b"".join(rest)


def forget_state(paths: GuestPaths) -> None:
    """From here on a session starts as a new one does."""
    for name in (b"shell", b"folder"):
        # A program may have put something else in its place: then that stays, and is no state.
        with contextlib.suppress(OSError):
            os.unlink(paths.state + b"/" + name)


def leave_lost_folder(paths: GuestPaths) -> None:
    """The session's folder is gone: it is in the workspace again."""
    with contextlib.suppress(OSError):
        os.unlink(paths.state + b"/folder")


def prepare_saving(paths: GuestPaths) -> None:
    """Make the folder for what the first shell is to leave, whatever a program has put in its place.

    That it cannot be kept nevertheless is seen, and said, when the shell has ended.
    """
    with contextlib.suppress(OSError):
        try:
            os.mkdir(paths.state, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(paths.state).st_mode):
                os.unlink(paths.state)
                os.mkdir(paths.state, 0o700)
            os.chmod(paths.state, 0o700)


def build_preamble(state: ShellState, paths: GuestPaths, token: bytes | None, is_long: bool) -> bytes:
    """The script that BASH_ENV names. `token`: what a shell that leaves its state ends that with.

    `is_long`: the command is no argument of the shell, but in SCRIPT_FD.
    """
    lines = [f"exec {PREAMBLE_FD}<&-".encode(), b"builtin unset -v BASH_ENV"]
    if is_long:
        lines.append(f"IFS= builtin read -r -d '' -u {SCRIPT_FD} BASH_EXECUTION_STRING\nexec {SCRIPT_FD}<&-".encode())
    if token is not None:
        # Before anything of the session's: a function of it may be called `trap`.
        save = _SAVE.format(next=os.fsdecode(_quote(_path_of_next(paths, token))), token=token.decode())
        lines.append(b"builtin trap -- " + _quote(os.fsencode(save)) + b" EXIT")
    if state.variables:
        lines.append(b"builtin eval " + _quote(state.variables) + b" >/dev/null 2>&1")
    if state.functions:
        # A function may have been written where extglob was on, and is not read again without.
        lines.append(b"builtin shopt -s extglob")
        lines.append(b"builtin eval " + _quote(state.functions) + b" >/dev/null 2>&1")
        lines.append(b"builtin shopt -u extglob")
    return b"\n".join(lines) + b"\n"


def build_shell(
    script: bytes, state: ShellState, paths: GuestPaths, token: bytes | None
) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
    """A shell of the session: its arguments, its environment, and what its descriptors from 3 on are to be. Raises
    Failure, OSError.
    """
    argv = build_bash_argv(script)
    is_long = len(script) > MAX_ARGUMENT_BYTES
    further = [open_in_memory(build_preamble(state, paths, token, is_long))]
    if is_long:
        argv[len(BASH)] = _RUN_LONG
        further.append(open_in_memory(script))
        os.lseek(further[1], 0, os.SEEK_SET)
    return argv, {**state.environment, b"BASH_ENV": f"/proc/self/fd/{PREAMBLE_FD}".encode()}, further


def open_in_memory(text: bytes) -> int:
    """A descriptor of it, in memory. Raises OSError."""
    fd = os.memfd_create("shell", os.MFD_CLOEXEC)
    view = memoryview(text)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def commit_state(paths: GuestPaths, before: ShellState, folder: bytes, started_in: bytes, token: bytes) -> StateOutcome:
    """Take over what a shell that ended by itself has written, whole or not at all: what `before` was stays.

    `folder` is the session's until now; the one that the shell was only started in does not become it.
    """
    result = StateOutcome(folder)
    raw = read_state_file(paths, b"next-" + token, MAX_STATE_BYTES + 1)
    drop_next(paths, token)
    if raw is None:
        return result
    parts = raw.split(b"\0")
    result.statuses = _read_statuses(parts[1]) if len(parts) > 1 else None
    if len(raw) > MAX_STATE_BYTES:
        result.outcome = TOO_LARGE
    elif len(parts) != _FIELDS or parts[6] != token:
        result.outcome = REPLACED if _has_room(paths) else NO_ROOM
    else:
        result.outcome = KEPT
        try:
            _keep(paths, before, b"\0".join((parts[3], parts[4] + parts[5], _END)))
            _move(result, paths, started_in, parts[2].removesuffix(b"\n"))
        except OSError:
            result.outcome = NO_ROOM
    return result


def drop_next(paths: GuestPaths, token: bytes) -> None:
    """Remove what a shell has written, if it has."""
    with contextlib.suppress(OSError):
        os.unlink(_path_of_next(paths, token))


def _path_of_next(paths: GuestPaths, token: bytes) -> bytes:
    # Nobody can put a pipe in its place beforehand, which the shell would wait for.
    return paths.state + b"/next-" + token


def is_allowed(folder: bytes, paths: GuestPaths) -> bool:
    """Whether a folder, its links resolved already, lies in one of the roots."""
    return any(folder == root or folder.startswith(root + b"/") for root in paths.roots)


def _has_room(paths: GuestPaths) -> bool:
    """Whether it was not for want of room that a shell has written less than all."""
    try:
        status = os.statvfs(paths.state)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= MAX_STATE_BYTES


def _move(result: StateOutcome, paths: GuestPaths, started_in: bytes, folder: bytes) -> None:
    if folder == started_in:
        return
    if not folder or not os.path.isdir(folder):
        result.stray = b""
    elif not is_allowed(os.path.realpath(folder), paths):
        result.stray = folder
    elif folder != result.folder:
        write_state_file(paths, b"folder", folder)
        result.folder, result.moved = folder, True


def _keep(paths: GuestPaths, before: ShellState, content: bytes) -> None:
    if before.raw != content:
        write_state_file(paths, b"shell", content)


def _read_statuses(field: bytes) -> list[int] | None:
    words = field.split()
    if not words or len(words) > _MAX_STATUSES or not all(word.isdigit() and len(word) <= 3 for word in words):
        return None
    return [min(int(word), 255) for word in words]


def _quote(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


class ShellSession:
    """`prepare` before the command, `finish` after it."""

    def __init__(self, request: ExecRequest, paths: GuestPaths) -> None:
        self._request = request
        self._paths = paths
        self._folder = paths.workspace
        self._started_in = b""
        # The session's folder, where it was gone.
        self._lost: bytes | None = None
        # What an earlier shell has left unfinished is not taken for this one's.
        self._token = os.urandom(8).hex().encode() if request.keeps_state else None

    def prepare(self, script: bytes) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
        """Arguments, environment, and what its further descriptors are to be; we are then where it is to run. Raises
        Failure, OSError.
        """
        if self._request.state == "fresh":
            forget_state(self._paths)
        self._before = load_state(self._paths)
        if self._before.raw is None and self._request.keeps_state:
            prepare_saving(self._paths)
        shell = build_shell(script, self._before, self._paths, self._token)
        self._folder, self._lost = enter_session_folder(self._request.cwd, self._paths)
        if self._lost is not None and self._request.keeps_state:
            leave_lost_folder(self._paths)
        self._started_in = os.getcwdb()
        return shell

    def finish(self, ended_by_itself: bool) -> dict[str, object]:
        """`state` and `pipe_status` of the done event. What a killed shell left is not the session's."""
        result = StateOutcome(self._folder, NONE)
        if self._token is not None and ended_by_itself:
            result = commit_state(self._paths, self._before, self._folder, self._started_in, self._token)
        elif self._token is not None:
            drop_next(self._paths, self._token)
        state = {
            "outcome": result.outcome,
            "folder": printable(result.folder),
            "moved": result.moved,
            "stray": printable(result.stray) if result.stray is not None else None,
            "lost": printable(self._lost) if self._lost is not None else None,
        }
        return {"state": state, "pipe_status": result.statuses}


def enter_session_folder(cwd: str | None, paths: GuestPaths) -> tuple[bytes, bytes | None]:
    """Go to `cwd`, or where the session is. Raises Failure when `cwd` is missing or not allowed.

    Gives the session's folder, which is the workspace when its own is gone, and that one.
    """
    folder = read_folder(paths)
    if cwd is not None:
        enter_directory(cwd, folder)
        if not is_allowed(os.getcwdb(), paths):
            os.chdir("/")
            roots = " and ".join(map(printable, paths.roots))
            raise Failure(PATH_NOT_ALLOWED, f"cwd {cwd}: outside of {roots}; a command may cd there itself")
        return folder, None
    with contextlib.suppress(OSError):
        os.chdir(folder)
        if is_allowed(os.getcwdb(), paths):
            return folder, None
    os.chdir(paths.workspace)
    return paths.workspace, folder
