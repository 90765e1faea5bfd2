"""One command as a part of its session: where it starts and with what, and what of it stays."""

from __future__ import annotations

import contextlib
import os

from guest.commands.session_folder import read_folder
from guest.commands.shell_state import (
    NONE,
    StateOutcome,
    commit_state,
    drop_next,
    forget_state,
    is_allowed,
    leave_lost_folder,
    load_state,
    prepare_saving,
)
from guest.commands.spawn import build_shell, enter_directory
from guest.failures import PATH_NOT_ALLOWED, Failure, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.commands.exec_requests import ExecRequest
    from guest.places import Places


class ShellSession:
    """`prepare` before the command, `finish` after it."""

    def __init__(self, request: ExecRequest, places: Places) -> None:
        self._request = request
        self._places = places
        self._folder = places.workspace
        self._started_in = b""
        # The session's folder, where it was gone.
        self._lost: bytes | None = None
        # What an earlier shell has left unfinished is not taken for this one's.
        self._token = os.urandom(8).hex().encode() if request.keeps_state else None

    def prepare(self, script: bytes) -> tuple[list[bytes], dict[bytes, bytes], list[int]]:
        """Arguments, environment, and what its further descriptors are to be; we are then where it is to run. Raises Failure, OSError."""
        if self._request.state == "fresh":
            forget_state(self._places)
        self._before = load_state(self._places)
        if self._before.raw is None and self._request.keeps_state:
            prepare_saving(self._places)
        shell = build_shell(script, self._before, self._places, self._token)
        self._folder, self._lost = enter_session_folder(self._request.cwd, self._places)
        if self._lost is not None and self._request.keeps_state:
            leave_lost_folder(self._places)
        self._started_in = os.getcwdb()
        return shell

    def finish(self, ended_by_itself: bool) -> dict[str, object]:
        """`state` and `pipe_status` of the done event. What a killed shell left is not the session's."""
        result = StateOutcome(self._folder, NONE)
        if self._token is not None and ended_by_itself:
            result = commit_state(self._places, self._before, self._folder, self._started_in, self._token)
        elif self._token is not None:
            drop_next(self._places, self._token)
        state = {
            "outcome": result.outcome,
            "folder": printable(result.folder),
            "moved": result.moved,
            "stray": printable(result.stray) if result.stray is not None else None,
            "lost": printable(self._lost) if self._lost is not None else None,
        }
        return {"state": state, "pipe_status": result.statuses}


def enter_session_folder(cwd: str | None, places: Places) -> tuple[bytes, bytes | None]:
    """Go to `cwd`, or where the session is. Raises Failure when `cwd` is missing or not allowed.

    Gives the session's folder, which is the workspace when its own is gone, and that one.
    """
    folder = read_folder(places)
    if cwd is not None:
        enter_directory(cwd, folder)
        if not is_allowed(os.getcwdb(), places):
            os.chdir("/")
            roots = " and ".join(map(printable, places.roots))
            raise Failure(PATH_NOT_ALLOWED, f"cwd {cwd}: outside of {roots}; a command may cd there itself")
        return folder, None
    with contextlib.suppress(OSError):
        os.chdir(folder)
        if is_allowed(os.getcwdb(), places):
            return folder, None
    os.chdir(places.workspace)
    return places.workspace, folder
