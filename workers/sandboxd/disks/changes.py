"""Lists the changes that a session made in the root file system of its image, from the layers of its overlay. The list
has only names. Programs inside the sandbox pack and unpack the files: they see the same files as the session and have
no more rights than the session.

This module is also the program that lists: its arguments are the descriptors of an empty file for the list, and of the
layers, the top one first. It is a process of its own, because a tree may have very many folders.
"""

import asyncio
import os
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.disks.children import limit_child, run_child
from toolcrew.workers.sandboxd.disks.folder_cursor import CHANGED, FolderCursor, MovedTooOften
from toolcrew.workers.sandboxd.disks.merging import Level, find_below
from toolcrew.workers.sandboxd.disks.workspace_store import refused

MAX_LIST_BYTES: Final = 16 * 1024 * 1024
_ENTRY_BYTES: Final = 32
"""Number of bytes that an entry counts towards the size limit of the list, in addition to its name."""
_PATH_BYTES: Final = 4095
"""Size of the longest path that programs can open (PATH_MAX of Linux)."""
_MODULE: Final = "toolcrew.workers.sandboxd.disks.changes"
_LIST_S: Final = 120.0
_TOO_LARGE: Final = 65
"""Exit code of this program for a list that is too large."""
_COUNT_BYTES: Final = 8
_PIECE_BYTES: Final = 256 * 1024


@dataclass(frozen=True)
class RootChanges:
    """Changes of the root file system of an image. `image`: its content id. The names are in a temporary file on the
    disk, not in memory. Names begin with `./` and end with NUL; the fields have the sizes of three lists, in bytes:
    `folders` exist in the image too and have changes in them. `replaced`: new files, and new folders that hide entries
    of the image with the same names. `removed`: names of the image that the session removed.
    """

    image: str
    file: int
    folders: int
    replaced: int
    removed: int

    def read_packed(self) -> AsyncIterator[bytes]:
        """Yield the names of `folders` and `replaced`, in pieces."""
        return self._read(0, self.folders + self.replaced)

    def read_replaced(self) -> AsyncIterator[bytes]:
        return self._read(self.folders, self.replaced)

    def read_removed(self) -> AsyncIterator[bytes]:
        return self._read(self.folders + self.replaced, self.removed)

    async def _read(self, start: int, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await asyncio.to_thread(os.pread, self.file, min(size, _PIECE_BYTES), start)
            if not piece:
                raise SandboxUnavailable("the list of changed files became shorter: try again")
            yield piece
            start, size = start + len(piece), size - len(piece)


class TooLarge(Exception):
    """Raised when a list is too large, or a path too long."""


@dataclass
class _ChangeList:
    """The names that are collected. Their total size is limited."""

    folders: bytearray = field(default_factory=bytearray)
    replaced: bytearray = field(default_factory=bytearray)
    removed: bytearray = field(default_factory=bytearray)
    _bytes: int = 0

    def add(self, names: bytearray, path: bytes) -> None:
        self._bytes += len(path) + _ENTRY_BYTES
        if self._bytes > MAX_LIST_BYTES or len(path) > _PATH_BYTES:
            raise TooLarge
        names += path + b"\0"


@asynccontextmanager
async def list_changes(image: str, layers: Sequence[int], folder: Path, tenant: str) -> AsyncIterator[RootChanges]:
    """Yield the changes in `layers`: descriptors of the folders over the image, the top one first. Programs may write
    to them meanwhile. For a folder that the image does not have, only its name is listed. `folder`: a folder on a disk
    for the temporary file. `tenant`: the owner of the session. Raises ToolFailure (FILE_TOO_LARGE) and
    SandboxUnavailable.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0)).fileno()
            changes = await _list_into(file, image, layers, tenant)
        except OSError as error:
            raise refused("the changes of the root file system cannot be listed", error) from error
        yield changes


async def _list_into(file: int, image: str, layers: Sequence[int], tenant: str) -> RootChanges:
    try:
        code = await run_child(tenant, _MODULE, (file, *layers), _LIST_S)
    except TimeoutError:
        code = _TOO_LARGE
    if code == _TOO_LARGE:
        raise ToolFailure(
            ErrorCode.FILE_TOO_LARGE,
            "the session has changed too many files outside of /workspace for a checkpoint, its programs move folders "
            f"all the time, or folders inside each other have a path of more than {_PATH_BYTES} bytes: end programs, "
            "delete files that you do not need, or build an image with them",
        )
    return _read_sizes(image, file)


def _read_sizes(image: str, file: int) -> RootChanges:
    end = os.fstat(file).st_size - 3 * _COUNT_BYTES
    sizes = os.pread(file, 3 * _COUNT_BYTES, max(end, 0))
    folders, replaced, removed = (
        int.from_bytes(sizes[at : at + _COUNT_BYTES], "big") for at in range(0, 3 * _COUNT_BYTES, _COUNT_BYTES)
    )
    if folders + replaced + removed != end:
        raise SandboxUnavailable("the list of changed files is incomplete: check the disk of sandboxd's state folder")
    return RootChanges(image, file, folders, replaced, removed)


@dataclass
class _Listing:
    """One listing of layers with a cursor for each."""

    cursors: Sequence[FolderCursor]
    found: _ChangeList = field(default_factory=_ChangeList)

    def run(self) -> None:
        """List all folders. Raises OSError and TooLarge."""
        top = tuple(range(len(self.cursors)))
        levels, paths = [Level(top, self._list_folder(b".", top))], [b"."]
        while levels:
            level = levels[-1]
            if not level.pending:
                levels.pop()
                paths.pop()
                self._return_to(levels, paths)
                continue
            name, layers = level.pending.pop()
            if self._enter(name, layers):
                paths.append(_join(paths[-1], name))
                levels.append(Level(layers, self._list_folder(paths[-1], layers)))

    def _enter(self, name: str, layers: Sequence[int]) -> bool:
        """Enter a subfolder in all of its layers, unless a program has just removed it."""
        for at, number in enumerate(layers):
            try:
                self.cursors[number].enter(name)
            except OSError as error:
                for entered in layers[:at]:
                    self.cursors[entered].leave()
                if error.errno in CHANGED:
                    return False
                raise
        return True

    def _return_to(self, levels: list[Level], paths: list[bytes]) -> None:
        """Move the cursors to the last level. If a program has moved a folder on the path, leave its levels too."""
        while levels:
            depth = len(levels) - 1
            cursors = [self.cursors[number] for number in levels[-1].layers]
            for cursor in cursors:
                while cursor.depth > depth:
                    cursor.leave()
            if all(cursor.depth == depth for cursor in cursors):
                return
            levels.pop()
            paths.pop()

    def _list_folder(self, path: bytes, layers: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """List the current folder in every layer that contains it. Return its subfolders that must be listed too, each
        with its layers.
        """
        subfolders, names = list[tuple[str, tuple[int, ...]]](), set[str]()
        folders, found = [self.cursors[number].fd for number in layers], self.found
        for at, folder in enumerate(folders):
            # One entry at a time: a folder may have more entries than a list should.
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in names:
                        continue
                    names.add(entry.name)
                    entry_path = _join(path, entry.name)
                    if not entry.is_dir(follow_symlinks=False):
                        found.add(found.removed if _is_whiteout(entry) else found.replaced, entry_path)
                        continue
                    below, is_opaque = find_below(entry.name, folders[at:])
                    found.add(found.replaced if is_opaque else found.folders, entry_path)
                    if not is_opaque and below:
                        subfolders.append((entry.name, tuple(layers[at + offset] for offset in below)))
        return subfolders


def _join(path: bytes, name: str) -> bytes:
    return path + b"/" + os.fsencode(name)


def _is_whiteout(entry: "os.DirEntry[str]") -> bool:
    """Return whether the entry hides what lower layers have under its name."""
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return False
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def find_changes(layers: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    """Return the lists of `RootChanges`. Raises OSError and TooLarge."""
    with ExitStack() as stack:
        cursors = [FolderCursor(layer) for layer in layers]
        for cursor in cursors:
            stack.callback(cursor.close)
        listing = _Listing(cursors)
        listing.run()
    found = listing.found
    return bytes(found.folders), bytes(found.replaced), bytes(found.removed)


def main() -> int:
    limit_child()
    file, *layers = map(int, sys.argv[1:])
    try:
        lists = find_changes(layers)
    except (TooLarge, MovedTooOften):
        return _TOO_LARGE
    with open(file, "wb", closefd=False) as opened:
        for names in lists:
            opened.write(names)
        for names in lists:
            opened.write(len(names).to_bytes(_COUNT_BYTES, "big"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
