"""Entries: how streams and requests describe a file, and how they find it."""

from __future__ import annotations

import contextlib
import os
import stat

from guest.confinement import DirectoryEntry, find_entry
from guest.failures import describe_os_error
from guest.fields import printable
from guest.streams.metadata import read_metadata
from guest.users import AccountNames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.paths import GuestPaths

_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
_WITH_METADATA = (stat.S_IFREG, stat.S_IFDIR)
_READABLE_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def located(
    path: str, paths: GuestPaths, make_parents: bool = False, follow_last: bool = True
) -> Iterator[DirectoryEntry]:
    """Find the entry of a path, and close it at the end. A relative path starts at the session's folder.

    Raises RequestFailure, also for an error of the kernel in the block. BrokenPipeError means that the client has left.
    """
    entry = find_entry(absolute(path, paths), paths, make_parents, is_exact=True, follow_last=follow_last)
    try:
        yield entry
    except BrokenPipeError:
        raise
    except OSError as error:
        raise describe_os_error(error, entry.shown) from None
    finally:
        entry.close()


def absolute(path: str, paths: GuestPaths) -> str:
    """Return a path of a client as an absolute one, without `.` and without slashes at its end. `..` stays."""
    parts = os.path.join(os.fsdecode(paths.workspace), path).split("/")
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def open_subfolder(directory: int, name: bytes | str) -> int:
    """Return a descriptor of a folder in an open folder. A link is not followed. Raises OSError."""
    return os.open(name, _READABLE_FOLDER, dir_fd=directory)


class EntryReader:
    """Reads entries. It knows the names of users and groups; `refresh` reads them again if their files changed."""

    def __init__(self) -> None:
        self._names = AccountNames()
        self.refresh = self._names.refresh

    def read_located(self, entry: DirectoryEntry, path: str, paths: GuestPaths) -> dict[str, object]:
        """Return the entry at a path of the client. Raises OSError."""
        return self.read(entry.directory, entry.name, absolute(path, paths).encode("utf-8", "surrogateescape"))

    def read(self, directory: int, name: bytes, path: bytes) -> dict[str, object]:
        """Return the entry of a name in an open folder. `path`: the path to show. Raises OSError."""
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        place = b"/proc/self/fd/%d/%b" % (directory, name)
        return {
            "name": printable(path.rpartition(b"/")[2] or b"/"),
            "path": printable(path),
            "type": _TYPES.get(kind, "other"),
            "size": status.st_size,
            "mode": stat.S_IMODE(status.st_mode),
            "owner": self._names.users.get(status.st_uid, str(status.st_uid)),
            "group": self._names.groups.get(status.st_gid, str(status.st_gid)),
            "uid": status.st_uid,
            "gid": status.st_gid,
            "modified_at": status.st_mtime,
            "target": printable(os.path.realpath(path)) if kind == stat.S_IFLNK else None,
            "metadata": read_metadata(place) if kind in _WITH_METADATA else {},
        }
