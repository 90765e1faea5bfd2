"""The directory where a search starts. Its descriptor stays open, so a directory that replaces it meanwhile is not
searched.
"""

from __future__ import annotations

import os

from guest.commands.shell_state import read_folder
from guest.fields import escaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.paths import GuestPaths


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
        self.root = next((root for root in roots if is_below(self.real, root)), self.real) or b"/"
        self.above = [part for part in self.real[len(self.root) :].split(b"/") if part]
        self.shown = _shown_prefix(self.real, os.path.realpath(read_folder(paths)))

    def show(self, path: bytes) -> str:
        """Return a path below the directory as one line of text.

        A path in the session's folder is relative to that folder.
        """
        return escaped(self.shown + path)


def _shown_prefix(real: bytes, folder: bytes) -> bytes:
    if real == folder:
        return b""
    inside = folder.rstrip(b"/") + b"/"
    return (real[len(inside) :] if real.startswith(inside) else real.rstrip(b"/")) + b"/"


def is_below(path: bytes, folder: bytes) -> bool:
    """Return whether a path is the folder or lies in it."""
    return path == folder or path.startswith(folder + b"/")
