"""Lists the changes that a session made in the root file system of its image, from the layers of its overlay. The list
has only names. Programs inside the sandbox pack and unpack the files: they see the same files as the session and have
no more rights than the session.
"""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from contract.errors import ErrorCode, ToolFailure
from workers.sandboxd.disks.merging import descended, find_below

MAX_LIST_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 32
"""Number of bytes that an entry counts towards the size limit of the list, in addition to its name."""
_NOT_KEPT = frozenset(("tmp",))
"""Folders of the root that no checkpoint has."""


@dataclass(frozen=True)
class RootChanges:
    """Changes of the root file system of an image. `image`: its content id. Names begin with `./` and end with NUL.
    `folders`: folders that exist in the image too and have changes in them. `replaced`: new files, and new folders that
    hide entries of the image with the same names. `removed`: names of the image that the session removed.
    """

    image: str
    folders: bytes
    replaced: bytes
    removed: bytes


@dataclass
class _ChangeList:
    """The names that are collected. Their total size is limited."""

    folders: bytearray = field(default_factory=bytearray)
    replaced: bytearray = field(default_factory=bytearray)
    removed: bytearray = field(default_factory=bytearray)
    _bytes: int = 0

    def add(self, names: bytearray, path: tuple[str, ...]) -> None:
        name = os.fsencode(f"./{'/'.join(path)}\0")
        self._bytes += len(name) + _ENTRY_BYTES
        if self._bytes > MAX_LIST_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                "the session has changed too many files outside of /workspace for a checkpoint: delete files that you "
                "do not need, or build an image with them",
            )
        names += name


def list_changes(image: str, layers: Sequence[int]) -> RootChanges:
    """List the changes in `layers`: descriptors of the folders over the image, the top one first. Programs may write to
    them during the call. For a folder that the image does not have, only its name is listed. Raises ToolFailure
    (FILE_TOO_LARGE) and OSError.
    """
    found = _ChangeList()
    pending: list[tuple[tuple[str, ...], list[int]]] = [((), list(range(len(layers))))]
    while pending:
        path, numbers = pending.pop()
        for name, below in _list_folder(path, [layers[number] for number in numbers], found):
            pending.append(((*path, name), [numbers[position] for position in below]))
    return RootChanges(image, bytes(found.folders), bytes(found.replaced), bytes(found.removed))


def _list_folder(path: tuple[str, ...], layers: Sequence[int], found: _ChangeList) -> list[tuple[str, list[int]]]:
    """List one folder in every layer that contains it. Return its subfolders that must be listed too, each with the
    positions of its layers.
    """
    subfolders, names = list[tuple[str, list[int]]](), set[str]()
    with ExitStack() as stack:
        try:
            folders = [stack.enter_context(descended(layer, path)) for layer in layers]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return []  # a program has just removed it
            raise
        for at, folder in enumerate(folders):
            # One entry at a time: a folder may have more entries than a list should.
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in names or (not path and entry.name in _NOT_KEPT):
                        continue
                    names.add(entry.name)
                    entry_path = (*path, entry.name)
                    if not entry.is_dir(follow_symlinks=False):
                        found.add(found.removed if _is_whiteout(entry) else found.replaced, entry_path)
                        continue
                    below, is_opaque = find_below(entry.name, folders[at:])
                    found.add(found.replaced if is_opaque else found.folders, entry_path)
                    if not is_opaque:
                        subfolders.append((entry.name, [at + offset for offset in below]))
    return subfolders


def _is_whiteout(entry: "os.DirEntry[str]") -> bool:
    """Return whether the entry hides what lower layers have under its name."""
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return False
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
