"""The state of a session's shells: the current folder, the exported variables and the functions at the end of the last
command.

The shell writes its state at its end. The next shell reads the state before its script (`build_setup`).

Invariant: the state files contain untrusted text, because programs of the sandbox can write them. A state is replaced
completely or not at all. A shell that was killed does not change the state.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from guest.commands.scripts import build_script_start, quote
from guest.failures import PATH_NOT_ALLOWED, RequestFailure
from guest.fields import printable
from guest.paths import ENVIRONMENT, GuestPaths
from guest.processes import enter_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from guest.commands.exec_request import ExecRequest

_MAX_PATH = 4096
MAX_STATE_BYTES = 262_144
_END = b"end"
_MAX_STATUSES = 64
# Code of an EXIT trap. It uses only builtins, so no process is forked. Output of the script's own traces and traps also
# goes to the file, before the first NUL, and is ignored. The code uses no variables, because the script may have made
# any name readonly or a reference.
_SAVE = """{{ builtin set -- "${{PIPESTATUS[@]}}"; builtin trap - DEBUG ERR; builtin trap "" XFSZ; builtin set +exu
builtin printf "\\0"; builtin printf "%s " "$@"; builtin printf "\\0"; builtin pwd -P; builtin printf "\\0"
builtin export -n PWD; builtin declare -px; builtin printf "\\0"; builtin declare -f
builtin printf "\\0"; builtin declare -F
builtin printf "\\0%s" {token}; }} 2>/dev/null >|{next}"""
_FIELDS = 7
# The text that bash prints for a variable whose value needs no quoting.
_VARIABLE_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_VARIABLE = re.compile(rb'declare -x ([A-Za-z_][A-Za-z0-9_]*)="([^"\\$`]*)"')
# Placeholders of secrets belong to one session, but a state may be used by another: after a fork, or after a restore
# from a checkpoint. So a state has the names of secrets in place of their placeholders.
_PLACEHOLDER = re.compile(rb"tcs_placeholder_[0-9a-f]{32}")
_SECRET = re.compile(rb"tcs_secret_([A-Z][A-Z0-9_]{0,63})_end")
# Files of a session with secrets. Another session may not have them.
_AUTHORITIES = b"/skills/authority/"
_OUR_NAMES = frozenset(name.encode() for name in ENVIRONMENT)
# Variables that are not stored. Every shell sets its previous folder and its nesting depth itself. The descriptor in
# BASH_XTRACEFD ended with its shell; bash would close another of this number when a script unsets the variable.
_OWN_VARIABLES = (b"declare -x SHLVL=", b"declare -x BASH_XTRACEFD")
_OWN_FOLDER = b"declare -x OLDPWD"


def read_folder(paths: GuestPaths) -> bytes:
    """Return the session's folder, where relative paths start: the folder in which the last command ended, at first the
    workspace.
    """
    folder = read_state_file(paths, b"folder", _MAX_PATH)
    return folder if folder is not None and folder.startswith(b"/") and b"\0" not in folder else paths.workspace


def write_state_file(paths: GuestPaths, name: bytes, content: bytes) -> None:
    """Write a file of the state in one step: the file is replaced completely or not at all. Raises OSError."""
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


def read_state_file(paths: GuestPaths, name: bytes, max_bytes: int) -> bytes | None:
    """Return at most `max_bytes` bytes of a file of the state.

    Return None when the file is missing or is not a regular file: reading a pipe might never end.
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
        parts, remaining = [], min(status.st_size, max_bytes)
        while remaining > 0 and (part := os.read(fd, remaining)):
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)


NONE, KEPT, REPLACED, TOO_LARGE, NO_ROOM = "none", "kept", "replaced", "too_large", "no_room"


class ShellState:
    """The state with which a shell starts.

    `environment`: variables that are passed in the environment. `variables` and `functions`: bash source text that
    defines the others. `raw`: content of the state file, or None when there was no file.
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
    """Result of storing a shell's state.

    `outcome`: one of the constants above. `folder`: the session's folder from now on. `moved`: True if the folder has
    changed. `stray`: the folder in which the shell ended, if the session cannot use it; "" if it no longer exists.
    `statuses`: exit statuses of the last pipeline's members, or None when the shell did not report them.
    """

    __slots__ = ("folder", "moved", "outcome", "statuses", "stray")

    def __init__(self, folder: bytes, outcome: str = REPLACED) -> None:
        self.outcome = outcome
        self.folder = folder
        self.moved = False
        self.stray: bytes | None = None
        self.statuses: list[int] | None = None


def load_state(paths: GuestPaths) -> ShellState:
    """Return the state that the last shell left. Return the state of a new session when there is none, or when the
    file is not complete.
    """
    raw = read_state_file(paths, b"shell", MAX_STATE_BYTES)
    parts = raw.split(b"\0") if raw is not None else []
    own = {os.fsencode(name): os.fsencode(value) for name, value in paths.environment.items()}
    if len(parts) != 3 or parts[2] != _END:
        return ShellState(own, b"", b"")
    secrets = _find_secrets(paths)
    filled = [_SECRET.sub(lambda secret: secrets.get(secret[1], b""), part) for part in parts[:2]]
    environment, variables = _split_variables(filled[0], own)
    environment.update({name: value for name, value in own.items() if _is_of_session(name, value)})
    if b"PATH" not in environment:
        # A shell that starts without PATH sets a default PATH.
        variables = b"builtin unset -v PATH\n" + variables
    return ShellState(environment, variables, filled[1], raw)


def _is_of_session(name: bytes, value: bytes) -> bool:
    """Return whether a variable of the guest's environment is passed to each shell: those of the session's secrets, and
    those whose name bash does not store.
    """
    return (
        value.startswith(_AUTHORITIES)
        or _PLACEHOLDER.fullmatch(value) is not None
        or _VARIABLE_NAME.fullmatch(name) is None
    )


def _find_secrets(paths: GuestPaths) -> dict[bytes, bytes]:
    """Return the placeholder of each secret of the session."""
    own = [(os.fsencode(name), os.fsencode(value)) for name, value in paths.environment.items()]
    return {name: value for name, value in own if _PLACEHOLDER.fullmatch(value)}


def _split_variables(text: bytes, own: Mapping[bytes, bytes]) -> tuple[dict[bytes, bytes], bytes]:
    """Return the variables that can be passed in the environment, and the bash source text of the others.

    Passing a variable in the environment is faster than source text. This is done only for names that the guest's own
    environment has. Bash gives other names, such as IFS, a different meaning when they are in its environment.
    """
    environment, rest = {}, []
    for line in text.splitlines(keepends=True):
        plain = _PLAIN_VARIABLE.fullmatch(line.rstrip(b"\n"))
        if plain is not None and plain[1] in _OUR_NAMES:
            environment[plain[1]] = plain[2]
        elif plain is not None and plain[2].startswith(_AUTHORITIES) and plain[2] not in own.values():
            continue
        elif line.rstrip(b"\n") != _OWN_FOLDER and not line.startswith(_OWN_VARIABLES):
            rest.append(line)
    return environment, b"".join(rest)


def forget_state(paths: GuestPaths) -> None:
    """Remove the state, so that the next shell starts like the shell of a new session."""
    for name in (b"shell", b"folder"):
        # If a program has put a folder under this name, it stays; it is not read as a state.
        with contextlib.suppress(OSError):
            os.unlink(paths.state + b"/" + name)


def leave_lost_folder(paths: GuestPaths) -> None:
    """Set the session's folder to the workspace, because the session's folder cannot be entered."""
    with contextlib.suppress(OSError):
        os.unlink(paths.state + b"/folder")


def prepare_saving(paths: GuestPaths) -> None:
    """Create the folder for the state. Replace a file or link that a program has created under its name.

    An error is not reported here. When the shell has ended, the outcome reports that the state could not be stored.
    """
    with contextlib.suppress(OSError):
        try:
            os.mkdir(paths.state, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(paths.state).st_mode):
                os.unlink(paths.state)
                os.mkdir(paths.state, 0o700)
            os.chmod(paths.state, 0o700)


def build_setup(state: ShellState, paths: GuestPaths, token: bytes | None) -> bytes:
    """Return the bash source text that runs before a script.

    `token`: the text that ends the state that the shell writes, or None when the shell stores no state.
    """
    lines = []
    if token is not None:
        # Set the trap before the session's source text is read: the session may define a function named `trap`.
        save = _SAVE.format(next=os.fsdecode(quote(_path_of_next(paths, token))), token=token.decode())
        lines.append(b"builtin trap -- " + quote(os.fsencode(save)) + b" EXIT")
    if state.variables:
        lines.append(b"builtin eval " + quote(state.variables) + b" >/dev/null 2>&1")
    if state.functions:
        # Turn extglob on: bash may not be able to parse a function without it that was defined with it.
        lines.append(b"builtin shopt -s extglob")
        lines.append(b"builtin eval " + quote(state.functions) + b" >/dev/null 2>&1")
        lines.append(b"builtin shopt -u extglob")
    return b"\n".join(lines)


def build_shell(
    script: bytes, state: ShellState, paths: GuestPaths, token: bytes | None
) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
    """Return a shell's arguments, its environment, and its descriptors from 3 on. Raises RequestFailure and OSError."""
    # What the image's BASH_ENV defines is in the state afterwards. To run it again could undo later commands.
    setup = build_setup(state, paths, token)
    return build_script_start(
        script, state.environment, setup, runs_file=state.raw is None, keeps_statuses=token is not None
    )


def commit_state(paths: GuestPaths, before: ShellState, folder: bytes, started_in: bytes, token: bytes) -> StateOutcome:
    """Store the state that a shell has written, completely or not at all.

    `before`: the state with which the shell started. `folder`: the session's folder until now. If the shell ended in
    `started_in`, where it was only started, the session's folder does not change.
    """
    result = StateOutcome(folder)
    raw = read_state_file(paths, b"next-" + token, MAX_STATE_BYTES + 1)
    drop_next(paths, token)
    if raw is None:
        return result
    parts = raw.split(b"\0")
    result.statuses = _read_statuses(parts[1]) if len(parts) > 1 else None
    content = b"\0".join((parts[3], parts[4] + parts[5], _END)) if len(parts) == _FIELDS else b""
    for name, placeholder in _find_secrets(paths).items():
        content = content.replace(placeholder, b"tcs_secret_%s_end" % name)
    if max(len(raw), len(content)) > MAX_STATE_BYTES:
        result.outcome = TOO_LARGE
    elif len(parts) != _FIELDS or parts[6] != token:
        # Accept only a state that ends with the token, because others are incomplete: the shell was replaced (`exec`)
        # or had no space left.
        result.outcome = REPLACED if _has_room(paths) else NO_ROOM
    else:
        result.outcome = KEPT
        try:
            _store(paths, before, content)
            _move(result, paths, started_in, parts[2].removesuffix(b"\n"))
        except OSError:
            result.outcome = NO_ROOM
    return result


def drop_next(paths: GuestPaths, token: bytes) -> None:
    """Remove the state that a shell has written, if the file exists."""
    with contextlib.suppress(OSError):
        os.unlink(_path_of_next(paths, token))


def _path_of_next(paths: GuestPaths, token: bytes) -> bytes:
    # The token in the name is random, so no program can create a pipe under this name in advance, which would block the
    # shell forever.
    return paths.state + b"/next-" + token


def is_allowed(folder: bytes, paths: GuestPaths) -> bool:
    """Return whether a folder lies in one of the roots. The links in the path must be resolved already."""
    return any(folder == root or folder.startswith(root + b"/") for root in paths.roots)


def _has_room(paths: GuestPaths) -> bool:
    """Return whether the file system has space for a state. Without space, a shell may have written only a part."""
    try:
        status = os.statvfs(paths.state)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= MAX_STATE_BYTES


def _move(result: StateOutcome, paths: GuestPaths, started_in: bytes, folder: bytes) -> None:
    """Change the session's folder to the directory in which the shell ended, if the directory is allowed."""
    if folder == started_in:
        return
    if not folder or not os.path.isdir(folder):
        result.stray = b""
    elif not is_allowed(os.path.realpath(folder), paths):
        result.stray = folder
    elif folder != result.folder:
        write_state_file(paths, b"folder", folder)
        result.folder, result.moved = folder, True


def _store(paths: GuestPaths, before: ShellState, content: bytes) -> None:
    """Write the state file, unless the state is unchanged."""
    if before.raw != content:
        write_state_file(paths, b"shell", content)


def _read_statuses(field: bytes) -> list[int] | None:
    """Return the exit statuses in a field, or None when the field is invalid."""
    statuses = field.split()
    if (
        not statuses
        or len(statuses) > _MAX_STATUSES
        or not all(status.isdigit() and len(status) <= 3 for status in statuses)
    ):
        return None
    return [min(int(status), 255) for status in statuses]


class ShellSession:
    """The shell state of one command. Call `prepare` before the command and `finish` after it."""

    def __init__(self, request: ExecRequest, paths: GuestPaths) -> None:
        self._request = request
        self._paths = paths
        self._folder = paths.workspace
        self._started_in = b""
        # The session's folder, if it cannot be entered; otherwise None.
        self._lost_folder: bytes | None = None
        # The token marks the state of this shell, so that an incomplete state of an earlier shell is not used.
        self._token = os.urandom(8).hex().encode() if request.keeps_state else None

    def prepare(self, script: bytes) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
        """Return the shell's arguments, its environment, and its descriptors from 3 on. Raises RequestFailure and
        OSError.

        Afterwards, the working directory of this process is the directory in which the shell must run.
        """
        if self._request.state == "fresh":
            forget_state(self._paths)
        self._before = load_state(self._paths)
        if self._before.raw is None and self._request.keeps_state:
            prepare_saving(self._paths)
        shell = build_shell(script, self._before, self._paths, self._token)
        self._folder, self._lost_folder = enter_session_folder(self._request.cwd, self._paths)
        if self._lost_folder is not None and self._request.keeps_state:
            leave_lost_folder(self._paths)
        self._started_in = os.getcwdb()
        return shell

    def finish(self, ended_by_itself: bool) -> dict[str, object]:
        """Return the `state` and `pipe_status` fields of the done event. The state of a killed shell is not stored."""
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
            "lost": printable(self._lost_folder) if self._lost_folder is not None else None,
        }
        return {"state": state, "pipe_status": result.statuses}


def enter_session_folder(cwd: str | None, paths: GuestPaths) -> tuple[bytes, bytes | None]:
    """Change to `cwd`, or to the session's folder when `cwd` is None.

    Return the session's folder and None. When the session's folder was removed or its mode forbids to enter it, change
    to the workspace, and return the workspace and the lost folder. When the workspace cannot be entered either, change
    to `/`, where a command can repair its mode, and return the workspace twice. Raises RequestFailure when `cwd` is
    missing or not allowed.
    """
    folder = read_folder(paths)
    if cwd is not None:
        enter_directory(cwd, folder)
        if not is_allowed(os.getcwdb(), paths):
            os.chdir("/")
            roots = " and ".join(map(printable, paths.roots))
            raise RequestFailure(PATH_NOT_ALLOWED, f"cwd {cwd}: outside of {roots}; a command may cd there itself")
        return folder, None
    with contextlib.suppress(OSError):
        os.chdir(folder)
        if is_allowed(os.getcwdb(), paths):
            return folder, None
    try:
        os.chdir(paths.workspace)
    except OSError:
        os.chdir("/")
        return paths.workspace, paths.workspace
    return paths.workspace, folder
