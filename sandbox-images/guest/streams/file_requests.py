"""The operations of the requests about files: stat, make_folder, move, remove and set_metadata."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from guest.confinement import pin_file
from guest.failures import (
    FILE_EXISTS,
    FILE_NOT_FOUND,
    INTERNAL,
    INVALID_ARGUMENTS,
    RequestFailure,
    describe_os_error,
)
from guest.paths import TOOLKIT
from guest.streams.entries import EntryReader, located, open_subfolder
from guest.streams.metadata import replace_metadata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from guest.confinement import DirectoryEntry
    from guest.paths import GuestPaths

_FOLDER_MODE = 0o755
_MESSAGE_BYTES = 4096
TOOLS = TOOLKIT
"""Folder of mv and rm. The session cannot replace these programs."""


def stat_entry(fields: dict[str, Any], paths: GuestPaths) -> dict[str, object]:
    """Return the entry of a path. A link is described, not followed."""
    with located(fields["path"], paths, follow_last=False) as entry:
        return {"entry": EntryReader().read_located(entry, fields["path"], paths)}


def make_folder(fields: dict[str, Any], paths: GuestPaths) -> dict[str, object]:
    """Create a folder and its parents, unless it exists."""
    with located(fields["path"], paths, make_parents=True) as entry:
        created = True
        try:
            os.mkdir(entry.name, _FOLDER_MODE, dir_fd=entry.directory)
            _set_mode(entry, fields["mode"])
        except FileExistsError:
            created = False
            if not stat.S_ISDIR(os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False).st_mode):
                raise RequestFailure(FILE_EXISTS, f"{entry.shown}: exists and is not a folder") from None
        return {"entry": EntryReader().read_located(entry, fields["path"], paths), "created": created}


def move(fields: dict[str, Any], paths: GuestPaths) -> dict[str, object]:
    """Rename a file or a folder. A file at the target is replaced; parents of the target are created."""
    with (
        located(fields["source"], paths, follow_last=False) as source,
        located(fields["target"], paths, make_parents=True, follow_last=False) as target,
    ):
        _check_may_go(source, paths)
        _check_may_go(target, paths)
        # Between two file systems, rename does not say that the source is missing.
        os.stat(source.name, dir_fd=source.directory, follow_symlinks=False)
        try:
            os.rename(source.name, target.name, src_dir_fd=source.directory, dst_dir_fd=target.directory)
        except OSError as error:
            if error.errno == errno.EINVAL:
                sentence = f"{source.shown}: a folder cannot move into itself; choose another target"
                raise RequestFailure(INVALID_ARGUMENTS, sentence) from None
            if error.errno != errno.EXDEV:
                raise describe_os_error(error, f"{source.shown} to {target.shown}") from None
            _move_by_copy(source, target)
        return {"entry": EntryReader().read_located(target, fields["target"], paths)}


def remove(fields: dict[str, Any], paths: GuestPaths) -> dict[str, object]:
    """Remove a file, a link, or a folder with everything in it. Nothing at the path is no error."""
    try:
        with located(fields["path"], paths, follow_last=False) as entry:
            _check_may_go(entry, paths)
            _remove(entry)
            return {"removed": 1}
    except RequestFailure as failure:
        if failure.code != FILE_NOT_FOUND:
            raise
        return {"removed": 0}


def set_metadata(fields: dict[str, Any], paths: GuestPaths) -> dict[str, object]:
    """Replace the metadata of a file or a folder. A link is followed."""
    with located(fields["path"], paths) as entry:
        fd = _open_for_metadata(entry)
        try:
            replace_metadata(fd, fields["metadata"], entry.shown)
        finally:
            os.close(fd)
        return {"entry": EntryReader().read_located(entry, fields["path"], paths)}


def _check_may_go(entry: DirectoryEntry, paths: GuestPaths) -> None:
    """Raise RequestFailure for the folders of the session, which cannot be removed or renamed."""
    place = os.path.join(os.readlink(b"/proc/self/fd/%d" % entry.directory), entry.name)
    if entry.name == b"." or place in paths.roots:
        raise RequestFailure(INVALID_ARGUMENTS, f"{entry.shown}: this folder must stay; name what is in it")


def _open_for_metadata(entry: DirectoryEntry) -> int:
    with contextlib.suppress(NotADirectoryError):
        return open_subfolder(entry.directory, entry.name)
    pinned = pin_file(entry)
    try:
        return os.open(f"/proc/self/fd/{pinned}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(pinned)


def _remove(entry: DirectoryEntry) -> None:
    """Remove an entry with everything below it."""
    try:
        os.unlink(entry.name, dir_fd=entry.directory)
    except (IsADirectoryError, PermissionError):
        # Linux reports EISDIR for a folder, other systems EPERM.
        if not stat.S_ISDIR(os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False).st_mode):
            raise
        # rm is fast, and removes folders of any depth.
        failure = _run_tool([b"rm", b"-rf"], [entry], entry.shown)
        if failure is not None:
            raise RequestFailure(failure.code, f"{failure.message}; some entries below it may be removed") from None


def _move_by_copy(source: DirectoryEntry, target: DirectoryEntry) -> None:
    """Move between two file systems with mv, which keeps modes, owners, times, links and extended attributes."""
    shown = f"{source.shown} to {target.shown}, which is another file system"
    failure = _run_tool([b"mv", b"-T"], [source, target], shown)
    if failure is not None:
        raise RequestFailure(failure.code, f"{failure.message}; a part may be at both places: compare them")


def _run_tool(command: list[bytes], entries: list[DirectoryEntry], shown: str) -> RequestFailure | None:
    """Run a program with the places of the entries, and return its failure. No link can lead it elsewhere."""
    for entry in entries:
        os.set_inheritable(entry.directory, True)
    places = [b"/proc/self/fd/%d/%b" % (entry.directory, entry.name) for entry in entries]
    output, errors = os.pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, errors, 2)]
        path = os.path.join(TOOLS, command[0])
        pid = os.posix_spawn(path, [*command, b"--", *places], {"LC_ALL": "C"}, file_actions=actions)
    except FileNotFoundError:
        # Not the file of the request is missing.
        raise RequestFailure(INTERNAL, f"the toolkit of the sandbox has no {os.fsdecode(command[0])}") from None
    finally:
        os.close(errors)
    with open(output, "rb") as file:
        text = file.read(_MESSAGE_BYTES)
        # Read the rest, so that the program does not wait for the pipe.
        while file.read(_MESSAGE_BYTES):
            pass
    return _describe(text, shown) if os.waitpid(pid, 0)[1] != 0 else None


def _describe(text: bytes, shown: str) -> RequestFailure:
    """Return the failure for the messages of a program, each of which ends with the text of an error number."""
    first = text.partition(b"\n")[0]
    number = next((number for number in errno.errorcode if first.endswith(os.strerror(number).encode())), errno.EIO)
    return describe_os_error(OSError(number, os.strerror(number)), shown)


def _set_mode(entry: DirectoryEntry, mode: int | None) -> None:
    if mode is not None:
        fd = open_subfolder(entry.directory, entry.name)
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
