"""The operations of the streams that read and write a file. Files may have any size; memory holds one block."""

from __future__ import annotations

import os
import stat

from guest.confinement import open_pinned, pin_file
from guest.failures import OFFSET_OUT_OF_RANGE, STALE_FILE, RequestFailure
from guest.files.versions import BodyContent, OldFile, Version, open_old
from guest.request_context import Watch
from guest.streams.entries import located
from guest.streams.metadata import read_metadata, replace_metadata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from guest.confinement import DirectoryEntry
    from guest.paths import GuestPaths
    from guest.streams.operations import ChildPipes

_BLOCK = 262_144
_NEW_MODE = 0o644
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_file(fields: dict[str, Any], paths: GuestPaths, pipes: ChildPipes) -> dict[str, object]:
    """Send a range of a regular file."""
    with located(fields["path"], paths) as entry:
        fd = open_pinned(pin_file(entry), os.O_RDONLY)
        status = os.fstat(fd)
        offset = fields["offset"]
        if offset > status.st_size:
            raise RequestFailure(OFFSET_OUT_OF_RANGE, f"{entry.shown}: has {status.st_size} bytes; use a lower offset")
        opened = {"size": status.st_size, "mode": stat.S_IMODE(status.st_mode), "modified_at": status.st_mtime}
        pipes.send_opened({**opened, "metadata": read_metadata(fd)})
        end = status.st_size if fields["bytes"] is None else min(status.st_size, offset + fields["bytes"])
        while offset < end:
            block = os.pread(fd, min(_BLOCK, end - offset), offset)
            if not block:
                raise RequestFailure(STALE_FILE, f"{entry.shown}: became shorter while it was read; read it again")
            pipes.send(block)
            offset += len(block)
        return {}


def write_file(fields: dict[str, Any], paths: GuestPaths, pipes: ChildPipes) -> dict[str, object]:
    """Write the client's bytes to a file: without `offset` as its new version, with `offset` into it."""
    with located(fields["path"], paths, make_parents=True) as entry:
        old = open_old(entry, os.O_WRONLY)
        write = _replace if fields["offset"] is None else _write_into
        return {"bytes": write(fields, entry, old, _Upload(pipes)), "created": old is None}


class _NoLimit(Watch):
    """No time limit: the client leaves when it wants to."""

    def __init__(self) -> None:
        pass

    def check(self) -> None:
        """Do nothing."""


class _Upload:
    """Content that arrives from the client, once. `size`: bytes so far."""

    def __init__(self, pipes: ChildPipes) -> None:
        self._pipes = pipes
        self.size = 0

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content. Raises RequestFailure(CANCELLED) when the client leaves."""
        self._pipes.send_opened({})
        for data in self._pipes.receive():
            self.size += len(data)
            yield memoryview(data)


def _replace(fields: dict[str, Any], entry: DirectoryEntry, old: OldFile | None, upload: _Upload) -> int:
    """Replace the file by a new version."""

    def finish(fd: int) -> None:
        metadata = fields["metadata"]
        if metadata is None and old is not None:
            metadata = read_metadata(old.fd)
        if metadata is not None:
            replace_metadata(fd, metadata, entry.shown)

    # A file that must be overwritten in place stays whole until the last byte has arrived.
    content = upload if old is None or not (old.must_stay or _is_closed(entry)) else _spool(upload, entry)
    Version(entry, content, _NoLimit(), fields["mode"], finish).replace(old)
    return upload.size


def _is_closed(entry: DirectoryEntry) -> bool:
    """Return whether the folder of an entry accepts no new names from this process."""
    return not os.access(f"/proc/self/fd/{entry.directory}", os.W_OK | os.X_OK, effective_ids=True)


def _spool(upload: _Upload, entry: DirectoryEntry) -> BodyContent:
    """Store the upload in a file without a name, in the folder of the entry if possible."""
    folder = "/tmp" if _is_closed(entry) else f"/proc/self/fd/{entry.directory}"
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    for block in upload.blocks():
        while block:
            block = block[os.write(fd, block) :]
    return BodyContent(fd)


def _write_into(fields: dict[str, Any], entry: DirectoryEntry, old: OldFile | None, upload: _Upload) -> int:
    """Write into the file from `offset` on."""
    fd = os.open(entry.name, _CREATE, _NEW_MODE, dir_fd=entry.directory) if old is None else old.fd
    at: int = fields["offset"]
    for block in upload.blocks():
        while block:
            count = os.pwrite(fd, block, at)
            block, at = block[count:], at + count
    if fields["mode"] is not None:
        os.fchmod(fd, fields["mode"])
    if fields["metadata"] is not None:
        replace_metadata(fd, fields["metadata"], entry.shown)
    os.fsync(fd)
    return upload.size
