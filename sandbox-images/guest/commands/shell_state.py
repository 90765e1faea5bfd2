"""What a session's shells leave for the next: folder, exported variables and functions, written by the shell itself as it ends.

A shell gets it by BASH_ENV, a script it runs before its own. Whatever the file holds was written by programs of the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from guest.commands.session_folder import read_state_file, write_state_file
from guest.places import ENVIRONMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.places import Places

MAX_STATE_BYTES = 262_144
PREAMBLE_FD = 3
SCRIPT_FD = 4
NONE, KEPT, REPLACED, TOO_LARGE, NO_ROOM = "none", "kept", "replaced", "too_large", "no_room"
_END = b"end"
_MAX_STATUSES = 64

# An EXIT trap, run by builtins alone: nothing is forked. What the script traces or traps goes into the file, in front of the first NUL.
# No variable: any name may be the script's, readonly or a reference to another.
_SAVE = """{{ builtin set -- "${{PIPESTATUS[@]}}"; builtin trap - DEBUG ERR; builtin trap "" XFSZ; builtin set +exu
builtin printf "\\0"; builtin printf "%s " "$@"; builtin printf "\\0"; builtin pwd -P; builtin printf "\\0"
builtin export -n PWD; builtin declare -px; builtin printf "\\0"; builtin declare -f; builtin printf "\\0"; builtin declare -F
builtin printf "\\0%s" {token}; }} 2>/dev/null >|{next}"""
_FIELDS = 7
# What bash writes of a variable whose value has nothing to be quoted.
_PLAIN_VARIABLE = re.compile(rb'declare -x ([A-Z_]+)="([^"\\$`]*)"')
_OUR_NAMES = frozenset(name.encode() for name in ENVIRONMENT)
# Every shell has these of its own: the folder it came from while there is none, and how deep it is.
_OWN_VARIABLES = (b"declare -x OLDPWD", b"declare -x SHLVL=")


class ShellState:
    """What a shell starts with: `environment` as it is handed to a program; `variables` and `functions` in bash's own words.

    `raw`: the file it came from, None where there was none.
    """

    __slots__ = ("environment", "functions", "raw", "variables")

    def __init__(self, environment: dict[bytes, bytes], variables: bytes, functions: bytes, raw: bytes | None = None) -> None:
        self.raw = raw
        self.environment = environment
        self.variables = variables
        self.functions = functions


class StateOutcome:
    """What became of a shell's state. `outcome`: one of the words above.

    `folder`: the session's from now on; `moved`: it is another than before. `stray`: where the shell ended when that cannot be kept,
    "" for a folder that is gone. `statuses`: of the members of its last pipeline, None when the shell did not tell.
    """

    __slots__ = ("folder", "moved", "outcome", "statuses", "stray")

    def __init__(self, folder: bytes, outcome: str = REPLACED) -> None:
        self.outcome = outcome
        self.folder = folder
        self.moved = False
        self.stray: bytes | None = None
        self.statuses: list[int] | None = None


def load_state(places: Places) -> ShellState:
    """What the last shell left, or what a new session has when there is nothing, or nothing that holds together."""
    raw = read_state_file(places, b"shell", MAX_STATE_BYTES)
    parts = raw.split(b"\0") if raw is not None else []
    if len(parts) != 3 or parts[2] != _END:
        return ShellState({name.encode(): value.encode() for name, value in places.environment.items()}, b"", b"")
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


def forget_state(places: Places) -> None:
    """From here on a session starts as a new one does."""
    for name in (b"shell", b"folder"):
        # A program may have put something else in its place: then that stays, and is no state.
        with contextlib.suppress(OSError):
            os.unlink(places.state + b"/" + name)


def leave_lost_folder(places: Places) -> None:
    """The session's folder is gone: it is in the workspace again."""
    with contextlib.suppress(OSError):
        os.unlink(places.state + b"/folder")


def prepare_saving(places: Places) -> None:
    """Make the folder for what the first shell is to leave, whatever a program has put in its place.

    That it cannot be kept nevertheless is seen, and said, when the shell has ended.
    """
    with contextlib.suppress(OSError):
        try:
            os.mkdir(places.state, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(places.state).st_mode):
                os.unlink(places.state)
                os.mkdir(places.state, 0o700)
            os.chmod(places.state, 0o700)


def build_preamble(state: ShellState, places: Places, token: bytes | None, is_long: bool) -> bytes:
    """The script that BASH_ENV names. `token`: what a shell that leaves its state ends that with.

    `is_long`: the command is no argument of the shell, but in SCRIPT_FD.
    """
    lines = [f"exec {PREAMBLE_FD}<&-".encode(), b"builtin unset -v BASH_ENV"]
    if is_long:
        lines.append(f"IFS= builtin read -r -d '' -u {SCRIPT_FD} BASH_EXECUTION_STRING\nexec {SCRIPT_FD}<&-".encode())
    if token is not None:
        # Before anything of the session's: a function of it may be called `trap`.
        save = _SAVE.format(next=os.fsdecode(_quote(_path_of_next(places, token))), token=token.decode())
        lines.append(b"builtin trap -- " + _quote(os.fsencode(save)) + b" EXIT")
    if state.variables:
        lines.append(b"builtin eval " + _quote(state.variables) + b" >/dev/null 2>&1")
    if state.functions:
        # A function may have been written where extglob was on, and is not read again without.
        lines.append(b"builtin shopt -s extglob")
        lines.append(b"builtin eval " + _quote(state.functions) + b" >/dev/null 2>&1")
        lines.append(b"builtin shopt -u extglob")
    return b"\n".join(lines) + b"\n"


def open_in_memory(text: bytes) -> int:
    """A descriptor of it, in memory. Raises OSError."""
    fd = os.memfd_create("shell", os.MFD_CLOEXEC)
    view = memoryview(text)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def commit_state(places: Places, before: ShellState, folder: bytes, started_in: bytes, token: bytes) -> StateOutcome:
    """Take over what a shell that ended by itself has written, whole or not at all: what `before` was stays.

    `folder` is the session's until now; the one that the shell was only started in does not become it.
    """
    result = StateOutcome(folder)
    raw = read_state_file(places, b"next-" + token, MAX_STATE_BYTES + 1)
    drop_next(places, token)
    if raw is None:
        return result
    parts = raw.split(b"\0")
    result.statuses = _read_statuses(parts[1]) if len(parts) > 1 else None
    if len(raw) > MAX_STATE_BYTES:
        result.outcome = TOO_LARGE
    elif len(parts) != _FIELDS or parts[6] != token:
        result.outcome = REPLACED if _has_room(places) else NO_ROOM
    else:
        result.outcome = KEPT
        try:
            _keep(places, before, b"\0".join((parts[3], parts[4] + parts[5], _END)))
            _move(result, places, started_in, parts[2].removesuffix(b"\n"))
        except OSError:
            result.outcome = NO_ROOM
    return result


def drop_next(places: Places, token: bytes) -> None:
    """Remove what a shell has written, if it has."""
    with contextlib.suppress(OSError):
        os.unlink(_path_of_next(places, token))


def _path_of_next(places: Places, token: bytes) -> bytes:
    # Nobody can put a pipe in its place beforehand, which the shell would wait for.
    return places.state + b"/next-" + token


def is_allowed(folder: bytes, places: Places) -> bool:
    """Whether a folder, its links resolved already, lies in one of the roots."""
    return any(folder == root or folder.startswith(root + b"/") for root in places.roots)


def _has_room(places: Places) -> bool:
    """Whether it was not for want of room that a shell has written less than all."""
    try:
        status = os.statvfs(places.state)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= MAX_STATE_BYTES


def _move(result: StateOutcome, places: Places, started_in: bytes, folder: bytes) -> None:
    if folder == started_in:
        return
    if not folder or not os.path.isdir(folder):
        result.stray = b""
    elif not is_allowed(os.path.realpath(folder), places):
        result.stray = folder
    elif folder != result.folder:
        write_state_file(places, b"folder", folder)
        result.folder, result.moved = folder, True


def _keep(places: Places, before: ShellState, content: bytes) -> None:
    if before.raw != content:
        write_state_file(places, b"shell", content)


def _read_statuses(field: bytes) -> list[int] | None:
    words = field.split()
    if not words or len(words) > _MAX_STATUSES or not all(word.isdigit() and len(word) <= 3 for word in words):
        return None
    return [min(int(word), 255) for word in words]


def _quote(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"
