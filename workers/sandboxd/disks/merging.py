"""A program that merges the folders of layers into a new one. It is a process of its own, because it may copy many
files. Arguments: the descriptor of an empty folder, then the descriptors of the folders to merge, the top one first.

Invariant: nothing is overwritten and no link is followed, because the names come from untrusted users. Every step opens
a name relative to a folder descriptor with O_NOFOLLOW. The depth costs no stack and no descriptors.
"""

import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.sandboxd.disks.ext4 import copy_data

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OVERLAY = "trusted.overlay."
_OPAQUE = f"{_OVERLAY}opaque"
_NICE = 10
_Path = tuple[str, ...]


@dataclass
class Merge:
    """A merge of `sources`, the top one first, into the empty folder `target`. Whiteouts and opaque folders, which hide
    entries of lower layers, are copied too: the result may lie over other layers.
    """

    sources: Sequence[int]
    target: int
    _links: dict[tuple[int, int, int], _Path] = field(default_factory=dict)
    """(number of the source, identity of a file with several names) -> the first path of the file in the target."""

    def run(self) -> None:
        """Merge all folders. Raises OSError."""
        with descended(self.sources[0], ()) as top:
            _copy_attributes(top, self.target)
        pending: list[tuple[_Path, list[int]]] = [((), list(range(len(self.sources))))]
        times: list[tuple[_Path, int]] = [((), 0)]
        while pending:
            path, numbers = pending.pop()
            for name, below in self._merge_folder(path, numbers):
                pending.append(((*path, name), below))
                times.append(((*path, name), below[0]))
        # Set the times of folders last, because every new entry changes the time of its folder.
        for path, number in times:
            with descended(self.target, path) as target, descended(self.sources[number], path) as source:
                _copy_times(os.fstat(source), target)

    def _merge_folder(self, path: _Path, numbers: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Copy the files of a folder and make its subfolders. Return the subfolders, each with the sources that contain
        it.
        """
        folders = list[int]()
        subfolders, names = list[tuple[str, list[int]]](), set[str]()
        try:
            folders += [_descend(self.sources[number], path) for number in numbers]
            with descended(self.target, path) as target:
                for at, folder in enumerate(folders):
                    for name in sorted(set(os.listdir(folder)) - names):
                        names.add(name)
                        status = os.lstat(name, dir_fd=folder)
                        if stat.S_ISDIR(status.st_mode):
                            below, is_opaque = find_below(name, folders[at:])
                            _make_folder(name, folder, target, is_opaque=is_opaque)
                            subfolders.append((name, [numbers[at + offset] for offset in below]))
                        else:
                            self._copy((*path, name), folder, target, status, numbers[at])
        finally:
            for fd in folders:
                os.close(fd)
        return subfolders

    def _copy(self, path: _Path, folder: int, target: int, status: os.stat_result, number: int) -> None:
        name, identity = path[-1], (number, status.st_dev, status.st_ino)
        if status.st_nlink > 1 and (first := self._links.setdefault(identity, path)) != path:
            with descended(self.target, first[:-1]) as other:
                os.link(first[-1], name, src_dir_fd=other, dst_dir_fd=target, follow_symlinks=False)
        elif stat.S_ISREG(status.st_mode):
            _copy_file(name, folder, target)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=folder), name, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
            os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)


def find_below(name: str, folders: Sequence[int]) -> tuple[list[int], bool]:
    """Return the positions of the folders that contribute to the merged subfolder `name`, and whether this subfolder is
    opaque (hides the content of deeper layers).
    """
    found = list[int]()
    for position, folder in enumerate(folders):
        try:
            fd = os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                return found, True
            raise
        found.append(position)
        try:
            if _OPAQUE in os.listxattr(fd):
                return found, True
        finally:
            os.close(fd)
    return found, False


def _make_folder(name: str, folder: int, target: int, *, is_opaque: bool) -> None:
    os.mkdir(name, 0o700, dir_fd=target)
    with descended(folder, (name,)) as source, descended(target, (name,)) as created:
        _copy_attributes(source, created)
        if is_opaque:
            os.setxattr(created, _OPAQUE, b"y")


def _copy_file(name: str, folder: int, target: int) -> None:
    source = os.open(name, _FILE, dir_fd=folder)
    try:
        created = os.open(name, _NEW, 0o600, dir_fd=target)
        try:
            copy_data(source, created)
            _copy_attributes(source, created)
            _copy_times(os.fstat(source), created)
        finally:
            os.close(created)
    finally:
        os.close(source)


def _copy_attributes(source: int, target: int) -> None:
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        if not name.startswith(_OVERLAY):
            os.setxattr(target, name, os.getxattr(source, name))


def _copy_times(status: os.stat_result, target: int) -> None:
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _descend(top: int, path: _Path) -> int:
    """Return the descriptor of a folder below another."""
    fd = os.open(".", _FOLDER, dir_fd=top)
    for name in path:
        above = fd
        try:
            fd = os.open(name, _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    return fd


@contextmanager
def descended(top: int, path: _Path) -> Iterator[int]:
    fd = _descend(top, path)
    try:
        yield fd
    finally:
        os.close(fd)


if __name__ == "__main__":
    os.nice(_NICE)
    target, *sources = map(int, sys.argv[1:])
    Merge(sources, target).run()
