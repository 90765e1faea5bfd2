"""Deletes a folder whose content a hostile user made: any depth, any names and modes, and no link is followed."""

import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path) -> None:
    """Delete `folder` and all in it; nobody else may be changing it. One that is not there is fine. Raises OSError.

    However deep it is, three descriptors and no recursion do: what a subfolder holds is moved up, and the empty subfolder removed.
    """
    try:
        top = _open_folder(str(folder), None)
    except FileNotFoundError:
        return
    try:
        _empty(top)
    finally:
        os.close(top)
    folder.rmdir()


def _empty(top: int) -> None:
    mark = secrets.token_hex(8)  # a name that nothing in the tree can have
    numbers = itertools.count()
    while True:
        names = list(_unlink_files(top))
        if not names:
            return
        for name in names:
            child = _open_folder(name, top)
            try:
                for inner in list(_unlink_files(child)):
                    os.close(_open_folder(inner, child))
                    os.rename(inner, f"{mark}-{next(numbers)}", src_dir_fd=child, dst_dir_fd=top)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=top)


def _unlink_files(folder: int) -> Iterator[str]:
    """The names of the subfolders; all else is deleted on the way."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name
            else:
                os.unlink(entry.name, dir_fd=folder)


def _open_folder(name: str, parent: int | None) -> int:
    """Open it whatever its mode is, where it is ours."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        allow_owner(name, parent)
        return os.open(name, _FOLDER, dir_fd=parent)
    if os.geteuid() != 0 and os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


def allow_owner(name: str, parent: int | None) -> None:
    """Give the owner of a folder his rights in it; its other rights stay, and a link is not followed. Raises OSError."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        path = f"/proc/self/fd/{fd}"
        os.chmod(path, os.stat(path).st_mode & 0o7777 | 0o700)
    finally:
        os.close(fd)
