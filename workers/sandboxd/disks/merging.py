"""A program that merges the folders of layers into a new one. It is a process of its own, because it may copy many
files. Arguments: the descriptor of an empty folder, then the descriptors of the folders to merge, the top one first.

Invariant: nothing is overwritten and no link is followed, because the names come from untrusted users. Every step opens
a name relative to a folder descriptor with O_NOFOLLOW. The depth costs no stack, no descriptors and no time: there is
one cursor for each layer and one for the target.
"""

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from toolcrew.workers.sandboxd.disks.children import limit_child
from toolcrew.workers.sandboxd.disks.ext4 import copy_data
from toolcrew.workers.sandboxd.disks.folder_cursor import FOLDER, FolderCursor

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OVERLAY = "trusted.overlay."
_OPAQUE = f"{_OVERLAY}opaque"


@dataclass
class Level:
    """A folder on the current path: the numbers of the layers that contain it, the top one first, and its subfolders
    that are not visited yet, each with its layers.
    """

    layers: tuple[int, ...]
    pending: list[tuple[str, tuple[int, ...]]]


@dataclass
class _LinkedFile:
    """A file with several names in a layer. `name`: its name in the folder of such files. `remaining`: how many of its
    names were not copied yet.
    """

    name: str
    remaining: int


@dataclass
class Merge:
    """A merge of `sources`, the top one first, into the empty folder `target`. Whiteouts and opaque folders, which hide
    entries of lower layers, are copied too: the result may lie over other layers.
    """

    sources: Sequence[int]
    target: int
    _cursors: list[FolderCursor] = field(init=False)
    _created: FolderCursor = field(init=False)
    _links: dict[tuple[int, int, int], _LinkedFile] = field(default_factory=dict)
    """Number of the source and identity of a file -> the file."""
    _links_name: str = field(default_factory=lambda: f".links-{secrets.token_hex(16)}")
    _links_folder: int = -1

    def run(self) -> None:
        """Merge all folders. Raises OSError."""
        with ExitStack() as stack:
            self._cursors = [FolderCursor(source) for source in self.sources]
            self._created = FolderCursor(self.target)
            for cursor in (*self._cursors, self._created):
                stack.callback(cursor.close)
            _copy_attributes(self._cursors[0].fd, self.target)
            with self._place_for_links():
                self._merge_tree()
            self._copy_times(0)

    def _merge_tree(self) -> None:
        top = tuple(range(len(self.sources)))
        levels = [Level(top, self._merge_folder(top))]
        while levels:
            level = levels[-1]
            if level.pending:
                name, layers = level.pending.pop()
                for cursor in (*(self._cursors[number] for number in layers), self._created):
                    cursor.enter(name)
                levels.append(Level(layers, self._merge_folder(layers)))
            elif len(levels) == 1:
                return
            else:
                # Set the time of a folder when it is complete, because every new entry changes it.
                self._copy_times(level.layers[0])
                for cursor in (*(self._cursors[number] for number in level.layers), self._created):
                    _leave(cursor)
                levels.pop()

    def _merge_folder(self, layers: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Copy the files of the current folder and make its subfolders. Return the subfolders, each with the layers
        that contain it.
        """
        subfolders, names = list[tuple[str, tuple[int, ...]]](), set[str]()
        folders = [self._cursors[number].fd for number in layers]
        for at, folder in enumerate(folders):
            for name in sorted(set(os.listdir(folder)) - names):
                names.add(name)
                status = os.lstat(name, dir_fd=folder)
                if stat.S_ISDIR(status.st_mode):
                    below, is_opaque = find_below(name, folders[at:])
                    _make_folder(name, folder, self._created.fd, is_opaque=is_opaque)
                    subfolders.append((name, tuple(layers[at + offset] for offset in below)))
                else:
                    self._copy(name, folder, status, layers[at])
        return subfolders

    def _copy(self, name: str, folder: int, status: os.stat_result, number: int) -> None:
        if status.st_nlink == 1:
            _copy_entry(name, folder, name, self._created.fd, status)
            return
        identity = (number, status.st_dev, status.st_ino)
        linked = self._links.get(identity)
        if linked is None:
            linked = self._links[identity] = _LinkedFile(str(len(self._links)), status.st_nlink)
            _copy_entry(name, folder, linked.name, self._links_folder, status)
        linked.remaining -= 1
        # The last name takes the place of the first one: a file may have as many names as the file system allows.
        folders = {"src_dir_fd": self._links_folder, "dst_dir_fd": self._created.fd}
        if linked.remaining:
            os.link(linked.name, name, **folders, follow_symlinks=False)
        else:
            os.rename(linked.name, name, **folders)

    @contextmanager
    def _place_for_links(self) -> Iterator[None]:
        """Make a folder for files with several names, from which their names are linked at any depth in one step. Its
        random name is in no layer.
        """
        os.mkdir(self._links_name, 0o700, dir_fd=self.target)
        self._links_folder = os.open(self._links_name, FOLDER, dir_fd=self.target)
        try:
            yield
            # Names that upper layers hide were not copied.
            for linked in self._links.values():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(linked.name, dir_fd=self._links_folder)
            os.rmdir(self._links_name, dir_fd=self.target)
        finally:
            os.close(self._links_folder)

    def _copy_times(self, layer: int) -> None:
        _copy_times(os.fstat(self._cursors[layer].fd), self._created.fd)


def _leave(cursor: FolderCursor) -> None:
    depth = cursor.depth
    cursor.leave()
    if cursor.depth != depth - 1:  # No program writes to frozen layers.
        raise OSError(errno.ESTALE, "a frozen layer has changed")


def find_below(name: str, folders: Sequence[int]) -> tuple[list[int], bool]:
    """Return the positions of the folders that contribute to the merged subfolder `name`, and whether this subfolder is
    opaque (hides the content of deeper layers).
    """
    found = list[int]()
    for position, folder in enumerate(folders):
        try:
            fd = os.open(name, FOLDER, dir_fd=folder)
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
    with _opened(name, FOLDER, folder) as source, _opened(name, FOLDER, target) as created:
        _copy_attributes(source, created)
        if is_opaque:
            os.setxattr(created, _OPAQUE, b"y")


def _copy_entry(name: str, folder: int, copy: str, target: int, status: os.stat_result) -> None:
    """Copy anything but a folder, as the name `copy` in the folder `target`."""
    if stat.S_ISREG(status.st_mode):
        _copy_file(name, folder, copy, target)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=folder), copy, dir_fd=target)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)
    else:
        os.mknod(copy, status.st_mode, status.st_rdev, dir_fd=target)
    os.chown(copy, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, folder: int, copy: str, target: int) -> None:
    with _opened(name, _FILE, folder) as source, _opened(copy, _NEW, target) as created:
        copy_data(source, created)
        _copy_attributes(source, created)
        _copy_times(os.fstat(source), created)


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _copy_attributes(source: int, target: int) -> None:
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        if not name.startswith(_OVERLAY):
            os.setxattr(target, name, os.getxattr(source, name))


def _copy_times(status: os.stat_result, target: int) -> None:
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def main() -> None:
    limit_child()
    target, *sources = map(int, sys.argv[1:])
    Merge(sources, target).run()


if __name__ == "__main__":
    main()
