"""Deletion and measurement of folders whose content an untrusted user created, with any depth, names and modes.

Invariant: no operation leaves the folder. Every step opens a name relative to a folder descriptor with O_NOFOLLOW, so
no symbolic link is ever followed. The depth costs no memory, stack or descriptors.
"""

import errno
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from toolcrew.workers.sandboxd.disks.base import WorkspaceSize

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TIMES = 4
"""The count stops at this multiple of the allowed files, which limits its time and memory."""
MAX_DEPTH = 16_384
"""Depth of folders above which a tree counts as overfull. Each part of a count opens the folders of its path again."""
_SHALLOW = 256


def remove_tree(folder: Path) -> None:
    """Delete `folder` and its content, which no other process may change during the call. A missing folder is
    ignored. Raises OSError.

    Three descriptors are enough at any depth, without recursion: the content of a subfolder is moved up, and the empty
    subfolder is removed.
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
    mark = secrets.token_hex(8)  # a random name that the tree cannot contain
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
    """Yield the names of subfolders and delete everything else."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name
            else:
                os.unlink(entry.name, dir_fd=folder)


def _open_folder(name: str, parent: int | None) -> int:
    """Open a folder. If it belongs to this user, its mode does not matter."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        allow_owner(name, parent)
        return os.open(name, _FOLDER, dir_fd=parent)
    if os.geteuid() != 0 and os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


def allow_owner(name: str, parent: int | None) -> None:
    """Give the owner of a folder all rights in it and keep its other rights. Does not follow a link. Raises OSError."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        path = f"/proc/self/fd/{fd}"
        os.chmod(path, os.stat(path).st_mode & 0o7777 | 0o700)
    finally:
        os.close(fd)


_Identity = tuple[int, int]


@dataclass
class _Level:
    """A folder on the current path: its identity, its name in the parent, and the subfolders that are not
    counted yet.
    """

    identity: _Identity
    name: str
    pending: list[str]


@dataclass
class TreeCount:
    """One count of a folder's files and bytes. It ends early when the folder has a multiple of the allowed files.

    A file with several names counts once. Files that move during the count may be missed or counted twice. A deleted
    file that is still open is not counted. A folder of this user without owner rights gets these rights. A tree counts
    as overfull if a folder cannot be read, if it is deeper than MAX_DEPTH, or if programs move its folders so often
    that the count cannot proceed.
    """

    folder: Path
    most: WorkspaceSize
    bytes: int = 0
    inodes: int = 0
    _is_hidden: bool = False
    _fd: int = -1
    _opened_again: int = 0
    _levels: list[_Level] | None = None
    _linked: set[_Identity] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self._is_hidden or self.bytes > self.most.bytes or self.inodes > self.most.inodes

    @property
    def counted_bytes(self) -> int:
        """Return the size of an overfull folder, which grows with the content. A file counts as at least its share of
        the size, so that many empty files count too.
        """
        return max(self.bytes, self.inodes * self.most.bytes // self.most.inodes, 1)

    @property
    def _is_enough(self) -> bool:
        return self.inodes >= self.most.inodes * _TIMES

    def advance(self, until: float) -> bool:
        """Continue the count until the monotonic time `until`, but by at least one folder. Return whether the count is
        complete.

        A missing folder counts as complete. Raises OSError.
        """
        began = time.monotonic()
        try:
            self._descend()
            if len(self._levels or ()) > _SHALLOW:
                # Proceed for at least as long as it took to get here. Otherwise a deep tree takes quadratic time.
                until = max(until, 2 * time.monotonic() - began)
            while self._levels and not self._is_enough:
                self._step(self._levels)
                if time.monotonic() >= until:
                    break
        except FileNotFoundError:
            return True
        finally:
            self._move_to(-1)
        return self._is_enough or not self._levels

    def _step(self, levels: list[_Level]) -> None:
        """Enter the next subfolder, or return to the parent."""
        if levels[-1].pending:
            name = levels[-1].pending.pop()
            child = self._open_child(name)
            if child is not None:
                self._move_to(child)
                self._enter(name)
                self._give_up_if(levels, is_over=len(levels) > MAX_DEPTH)
            return
        levels.pop()
        if not levels:
            return
        above = self._open_child("..")
        if above is not None:
            self._move_to(above)
        # The `..` of a folder that was moved during the count may be another folder, even outside of the tree.
        if above is None or _identify(os.fstat(above)) != levels[-1].identity:
            self._opened_again += len(levels)
            self._descend()
            self._give_up_if(levels, is_over=self._opened_again > self.most.inodes * _TIMES)

    def _give_up_if(self, levels: list[_Level], *, is_over: bool) -> None:
        if is_over:
            self._is_hidden = True
            levels.clear()

    def _descend(self) -> None:
        """Open the folders of the current path again from the top, as long as each is still the same folder. Drop the
        levels below.
        """
        self._move_to(self._open_top())
        if self._levels is None:
            self._levels = []
            self._enter("")
        for depth, level in enumerate(self._levels[1:], start=1):
            child = self._open_child(level.name)
            if child is None:
                del self._levels[depth:]
                return
            if _identify(os.fstat(child)) != level.identity:
                os.close(child)
                del self._levels[depth:]
                return
            self._move_to(child)

    def _open_top(self) -> int:
        try:
            return os.open(self.folder, _FOLDER)
        except PermissionError:
            allow_owner(str(self.folder), None)
            return os.open(self.folder, _FOLDER)

    def _move_to(self, fd: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def _open_child(self, name: str) -> int | None:
        """Return a descriptor, or None when the name is missing or no longer a folder."""
        try:
            return os.open(name, _FOLDER, dir_fd=self._fd)
        except PermissionError:
            return self._open_hidden(name)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def _open_hidden(self, name: str) -> int | None:
        try:
            allow_owner(name, self._fd)
            return os.open(name, _FOLDER, dir_fd=self._fd)
        except OSError:
            self._is_hidden = True
            return None

    def _enter(self, name: str) -> None:
        """Count the entries of an open folder, and add the folder to the current path."""
        pending: list[str] = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                self._count(status)
                if self._is_enough:
                    break
                if stat.S_ISDIR(status.st_mode):
                    pending.append(entry.name)
        if self._levels is not None:
            self._levels.append(_Level(_identify(os.fstat(self._fd)), name, pending))

    def _count(self, status: os.stat_result) -> None:
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if _identify(status) in self._linked:
                return
            self._linked.add(_identify(status))
        self.bytes += status.st_blocks * 512
        self.inodes += 1


def _identify(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino
