"""Opens the directory where a search starts. The descriptor stays open, so a directory that replaces it meanwhile is
not searched.
"""

from __future__ import annotations

import os

from guest.commands.shell_state import read_folder
from guest.confinement import DirectoryEntry, find_entry, pin_file
from guest.failures import FILE_NOT_FOUND, NOT_A_DIRECTORY, PATH_NOT_ALLOWED, RequestFailure, describe_os_error
from guest.fields import escaped
from guest.search.suggestions import missing_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Start:
    """The open directory, below a root, where a search starts.

    `file`: the only name to search in the directory, or None for everything below. `real`: the path without links.
    `above`: the names from the root to the directory.
    """

    __slots__ = ("above", "fd", "file", "real", "root", "shown")

    def __init__(self, fd: int, file: bytes | None, paths: GuestPaths) -> None:
        self.fd = fd
        self.file = file
        self.real = os.readlink(f"/proc/self/fd/{fd}".encode())
        roots = (root and os.path.realpath(root) for root in paths.readable)
        self.root = next((root for root in roots if _is_below(self.real, root)), self.real) or b"/"
        self.above = [part for part in self.real[len(self.root) :].split(b"/") if part]
        self.shown = _shown_prefix(self.real, os.path.realpath(read_folder(paths)))

    def show(self, path: bytes) -> str:
        """Return a path below the directory as one line of text.

        A path in the session's folder is relative to that folder.
        """
        return escaped(self.shown + path)


def open_start(path: str, paths: GuestPaths, may_miss: bool = False) -> Start:
    """Open the start of a search.

    Raises RequestFailure for a path outside the roots or inside the folder of the guest's own state. `may_miss`: the
    path may be missing, so the error suggests no similar paths.
    """
    try:
        entry = find_entry(path, paths, to_read=True)
        try:
            start = _open_entry(entry, paths)
        finally:
            entry.close()
    except RequestFailure as failure:
        raise missing_file(path, paths) if failure.code == FILE_NOT_FOUND and not may_miss else failure from None
    # Check the path of the open descriptor, so that a link or a replaced directory cannot bypass the check.
    if _is_below(start.real, os.path.realpath(paths.state)):
        os.close(start.fd)
        raise RequestFailure(PATH_NOT_ALLOWED, f"{entry.shown}: reserved for the sandbox itself")
    return start


def open_folder(path: str, paths: GuestPaths, may_miss: bool = False) -> Start:
    """Open a directory as the start of a search. Raises RequestFailure in the cases of `open_start`, and for a file."""
    start = open_start(path, paths, may_miss)
    if start.file is not None:
        os.close(start.fd)
        raise RequestFailure(
            NOT_A_DIRECTORY,
            f"{escaped(os.fsencode(path))}: is a file; give its folder, or its name as the pattern",
        )
    return start


def _open_entry(entry: DirectoryEntry, paths: GuestPaths) -> Start:
    try:
        return Start(os.open(entry.name, _DIRECTORY, dir_fd=entry.directory), None, paths)
    except NotADirectoryError:
        # `pin_file` raises unless the name is a regular file. The search then covers this one file in its folder.
        os.close(pin_file(entry))
        return Start(os.open(b".", _DIRECTORY, dir_fd=entry.directory), entry.name, paths)
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None


def _shown_prefix(real: bytes, folder: bytes) -> bytes:
    if real == folder:
        return b""
    inside = folder.rstrip(b"/") + b"/"
    return (real[len(inside) :] if real.startswith(inside) else real.rstrip(b"/")) + b"/"


def _is_below(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder + b"/")
