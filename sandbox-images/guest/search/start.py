"""Where a search begins: one directory, held open, so that no swap of a name leads it elsewhere."""

from __future__ import annotations

import os

from guest.commands.shell_state import read_folder
from guest.confinement import Place, find_place, pin_file
from guest.failures import FILE_NOT_FOUND, NOT_A_DIRECTORY, PATH_NOT_ALLOWED, Failure, describe_os_error
from guest.files.suggestions import escaped, missing_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Start:
    """An open directory below a root. `file`: the one name in it to search, None for all that is below.

    `real` is its path without links; `above` are the names from its root down to it.
    """

    __slots__ = ("above", "fd", "file", "real", "root", "shown")

    def __init__(self, fd: int, file: bytes | None, paths: GuestPaths) -> None:
        self.fd = fd
        self.file = file
        self.real = os.readlink(f"/proc/self/fd/{fd}".encode())
        self.root = next(
            (root for root in map(os.path.realpath, paths.readable) if _is_below(self.real, root)), self.real
        )
        self.above = [part for part in self.real[len(self.root) :].split(b"/") if part]
        self.shown = _shown_prefix(self.real, os.path.realpath(read_folder(paths)))

    def show(self, path: bytes) -> str:
        """A path below it as text on one line: relative to the session's folder where it lies in it."""
        return escaped(self.shown + path)


def open_start(path: str, paths: GuestPaths, may_miss: bool = False) -> Start:
    """Resolve where to search. Raises Failure: what the guest keeps for itself is not allowed, as anything beyond the
    roots.

    `may_miss`: that the path is not there is no surprise, and no path like it is looked for.
    """
    try:
        place = find_place(path, paths, to_read=True)
        try:
            start = _open_place(place, paths)
        finally:
            place.close()
    except Failure as failure:
        raise missing_file(path, paths) if failure.code == FILE_NOT_FOUND and not may_miss else failure from None
    if _is_below(start.real, os.path.realpath(paths.state)):
        os.close(start.fd)
        raise Failure(PATH_NOT_ALLOWED, f"{place.shown}: kept by the sandbox for itself")
    return start


def open_folder(path: str, paths: GuestPaths, may_miss: bool = False) -> Start:
    """As `open_start`, for a directory only."""
    start = open_start(path, paths, may_miss)
    if start.file is not None:
        os.close(start.fd)
        raise Failure(
            NOT_A_DIRECTORY,
            f"{escaped(os.fsencode(path))}: is a file; give the folder that it is in, or its name as the pattern",
        )
    return start


def _open_place(place: Place, paths: GuestPaths) -> Start:
    try:
        return Start(os.open(place.name, _DIRECTORY, dir_fd=place.directory), None, paths)
    except NotADirectoryError:
        os.close(pin_file(place))
        return Start(os.open(b".", _DIRECTORY, dir_fd=place.directory), place.name, paths)
    except OSError as error:
        raise describe_os_error(error, place.shown) from None


def _shown_prefix(real: bytes, folder: bytes) -> bytes:
    if real == folder:
        return b""
    inside = folder.rstrip(b"/") + b"/"
    return (real[len(inside) :] if real.startswith(inside) else real) + b"/"


def _is_below(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder + b"/")
