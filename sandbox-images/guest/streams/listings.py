"""The operation of the stream that lists a folder, depth-first and sorted by name, one JSON line per entry."""

from __future__ import annotations

import json
import os

from guest.paths import KERNEL_FOLDERS
from guest.streams.entries import EntryReader, absolute, located, open_subfolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from guest.paths import GuestPaths
    from guest.streams.operations import ChildPipes

MAX_DEPTH = 256
"""Limit of the depth: the folders of the current path are open."""
_SEND_BYTES = 32_768
_encode = json.JSONEncoder(check_circular=False).encode


def list_folder(fields: dict[str, Any], paths: GuestPaths, pipes: ChildPipes) -> dict[str, object]:
    """Send the entries below a folder. Memory holds the names of the folders of one path."""
    with located(fields["path"], paths) as entry:
        folder = open_subfolder(entry.directory, entry.name)
        pipes.send_opened({})
        path = absolute(fields["path"], paths).encode("utf-8", "surrogateescape")
        listing = _Listing(pipes, fields["depth"])
        listing.walk(folder, path)
        return {"entries": listing.count}


class _Listing:
    def __init__(self, pipes: ChildPipes, depth: int) -> None:
        self._pipes = pipes
        self._depth = depth
        self._reader = EntryReader()
        self._lines = bytearray()
        self.count = 0

    def walk(self, folder: int, path: bytes) -> None:
        """Send every entry, then what is left in the buffer."""
        levels = [_open_level(folder, path)]
        while levels:
            folder, prefix, names = levels[-1]
            if names:
                name = names.pop()
                # An entry may disappear at any time. A folder that this user may not read is listed without its
                # content.
                try:
                    if self._add(folder, name, prefix + name) and len(levels) < self._depth:
                        levels.append(_open_level(open_subfolder(folder, name), prefix + name))
                except (FileNotFoundError, PermissionError, NotADirectoryError):
                    continue
            else:
                os.close(folder)
                levels.pop()
        self._flush()

    def _add(self, folder: int, name: bytes, path: bytes) -> bool:
        """Add the line of an entry. Return whether it is a folder to list."""
        entry = self._reader.read(folder, name, path)
        self._lines += _encode(entry).encode() + b"\n"
        self.count += 1
        if len(self._lines) >= _SEND_BYTES:
            self._flush()
        return entry["type"] == "directory" and path not in KERNEL_FOLDERS

    def _flush(self) -> None:
        self._pipes.send(bytes(self._lines))
        self._lines.clear()


def _open_level(folder: int, path: bytes) -> tuple[int, bytes, list[bytes]]:
    """Return (descriptor, beginning of the paths in the folder, its names, the first one last)."""
    names = [os.fsencode(name) for name in os.listdir(folder)]
    names.sort(reverse=True)
    return folder, path.rstrip(b"/") + b"/", names
