"""A position in a tree of folders whose names come from untrusted users.

Invariant: no link is followed, because every step opens a name relative to a descriptor with O_NOFOLLOW. A step costs
the same at any depth, and a tree of any depth costs one descriptor.
"""

import errno
import os
from typing import Final

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH: Final = 4096
"""Maximum depth of a tree: the number of bytes of the longest path (PATH_MAX of Linux)."""
CHANGED: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors for a name that is no longer a folder."""


MAX_FOUND_AGAIN: Final = 500_000
"""Maximum number of folders that a cursor opens again because programs moved folders: some seconds."""


class MovedTooOften(OSError):
    """Raised when programs move folders all the time, so that a walk would take quadratic time."""


class FolderCursor:
    """A cursor that starts at the folder `top`. `fd`: a descriptor of the current folder. All methods raise OSError."""

    def __init__(self, top: int) -> None:
        self._top = top
        self.fd = os.open(".", FOLDER, dir_fd=top)
        self._path = [("", _identify(self.fd))]
        self._found_again = 0

    @property
    def depth(self) -> int:
        """The number of folders above the current one."""
        return len(self._path) - 1

    def enter(self, name: str) -> None:
        """Move to a subfolder. After an error the cursor has not moved."""
        if self.depth >= MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} folders inside each other", name)
        self._move_to(os.open(name, FOLDER, dir_fd=self.fd))
        self._path.append((name, _identify(self.fd)))

    def leave(self) -> None:
        """Move to the folder above. If a program has moved folders meanwhile, move to the nearest one above that is
        still at its path.
        """
        self._path.pop()
        self._move_to(os.open("..", FOLDER, dir_fd=self.fd))
        if _identify(self.fd) != self._path[-1][1]:
            self._find_again()

    def close(self) -> None:
        os.close(self.fd)

    def _find_again(self) -> None:
        self._found_again += len(self._path)
        if self._found_again > MAX_FOUND_AGAIN:
            raise MovedTooOften(errno.ESTALE, "programs moved folders too often while they were read")
        self._move_to(os.open(".", FOLDER, dir_fd=self._top))
        for depth, (name, identity) in enumerate(self._path[1:], start=1):
            fd = self._open_if_same(name, identity)
            if fd is None:
                del self._path[depth:]
                return
            self._move_to(fd)

    def _open_if_same(self, name: str, identity: tuple[int, int]) -> int | None:
        try:
            fd = os.open(name, FOLDER, dir_fd=self.fd)
        except OSError as error:
            if error.errno in CHANGED:
                return None
            raise
        if _identify(fd) == identity:
            return fd
        os.close(fd)
        return None

    def _move_to(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd


def _identify(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
