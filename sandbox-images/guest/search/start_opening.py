"""Opens the directory where a search starts, after a check of its path."""

from __future__ import annotations

import os

from guest.confinement import DirectoryEntry, find_entry, pin_file
from guest.failures import FILE_NOT_FOUND, NOT_A_DIRECTORY, PATH_NOT_ALLOWED, RequestFailure, describe_os_error
from guest.fields import escaped
from guest.search.start import Start, is_below
from guest.search.suggestions import missing_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
    if is_below(start.real, os.path.realpath(paths.state)):
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
