"""Write the next version of a file.

The new version is written next to the old one and replaces it in one step. If the old file must stay (it has hard links
or another owner), its content is overwritten in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from guest.confinement import DirectoryEntry, open_pinned, pin_file
from guest.failures import FILE_EXISTS, NO_SPACE, PERMISSION_DENIED, STALE_FILE, RequestFailure, describe_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    from guest.request_context import Watch

    class Content(Protocol):
        """Interface of content to write. Each call of `blocks` yields all pieces from the start."""

        size: int

        def blocks(self) -> Iterator[memoryview]: ...


TEMPORARY_PREFIX = b".toolcrew-"
"""Beginning of the name of a version that is not complete. A rename then gives it the name of the file."""
NEW_SUFFIX = b"-new"
"""End of the temporary name of a file that did not exist before."""
_BLOCK = 262_144
_NEW_MODE = 0o644
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Error numbers for a new name in a folder that accepts none. An existing file in it may still be writable.
_NO_NEW_NAMES = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class BodyContent:
    """The body of a request, which is read in blocks from its memory file."""

    __slots__ = ("_fd", "size")

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size if fd is not None else 0

    def blocks(self) -> Iterator[memoryview]:
        at = 0
        while self._fd is not None and (block := os.pread(self._fd, _BLOCK, at)):
            at += len(block)
            yield memoryview(block)


class BytesContent:
    """Content in memory, in one or several pieces."""

    __slots__ = ("_pieces", "size")

    def __init__(self, *pieces: bytes | memoryview) -> None:
        self._pieces = pieces
        self.size = sum(map(len, pieces))

    def blocks(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            view = memoryview(piece)
            for at in range(0, len(piece), _BLOCK):
                yield view[at : at + _BLOCK]


class OldFile:
    """Existing version of a file, open for reading and writing or for writing only."""

    __slots__ = ("fd", "status")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.status = os.fstat(fd)

    @property
    def must_stay(self) -> bool:
        """Return whether a replacement file would lose hard links or the owner of this file."""
        return self.status.st_nlink > 1 or (self.status.st_uid, self.status.st_gid) != (os.geteuid(), os.getegid())

    def close(self) -> None:
        os.close(self.fd)


def open_old(entry: DirectoryEntry, flags: int) -> OldFile | None:
    """Open the regular file of an entry. Returns None if there is no file. Raises RequestFailure and OSError.

    The file is opened for writing even if it will be replaced, so that a write-protected file is never changed.
    """
    try:
        pinned = pin_file(entry)
    except FileNotFoundError:
        return None
    try:
        return OldFile(open_pinned(pinned, flags))
    except PermissionError:
        raise RequestFailure(
            PERMISSION_DENIED,
            f"{entry.shown}: its permissions do not allow a change; if it should be changed, use chmod in bash_tool",
        ) from None
    finally:
        os.close(pinned)


class Version:
    """Writes new content to an entry (a name in a folder). If a method raises RequestFailure, the old content is intact
    and no temporary file remains.
    """

    def __init__(
        self,
        entry: DirectoryEntry,
        content: Content,
        watch: Watch,
        mode: int | None = None,
        finish: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare a write. `mode`: the mode of the file, instead of that of the old file. `finish` gets the descriptor
        of the complete file before it has its name.
        """
        self._entry = entry
        self._content = content
        self._watch = watch
        self._mode = mode
        self._finish = finish

    def create(self) -> os.stat_result:
        """Create the file. Raises RequestFailure(FILE_EXISTS) if the name exists, even if it was created a moment
        before.
        """
        if self._entry.is_link_target:
            raise self._exists()
        with self._described():
            return self._write_beside(_NEW_MODE, self._take_free_name)

    def replace(self, old: OldFile | None, is_known: bool = False) -> os.stat_result:
        """Replace `old` and keep its mode.

        `is_known`: the new content was made from the old content. RequestFailure(STALE_FILE) is then raised if the old
        file has changed.
        """
        with self._described():
            if old is None:
                return self._write_beside(_NEW_MODE, self._take_free_name if is_known else self._take_new_name)
            # If the folder accepts no new names, overwrite the old file instead.
            if not old.must_stay:
                try:
                    return self._write_beside(
                        stat.S_IMODE(old.status.st_mode), lambda fd: self._take_name(fd, old if is_known else None)
                    )
                except OSError as error:
                    if error.errno not in _NO_NEW_NAMES:
                        raise
            return self._write_over(old, is_known)

    def append(self, old: OldFile) -> os.stat_result:
        """Append to `old`, which must be open for appending."""
        with self._described():
            try:
                self._copy(old.fd)
                os.fsync(old.fd)
            except BaseException:
                # Remove a partial append, so that the file has its old content again.
                os.ftruncate(old.fd, old.status.st_size)
                raise
            return os.fstat(old.fd)

    def _write_beside(self, mode: int, publish: Callable[[int], None]) -> os.stat_result:
        fd, temporary = self._open_beside()
        try:
            self._copy(fd)
            os.fchmod(fd, mode if self._mode is None else self._mode)
            if self._finish is not None:
                self._finish(fd)
            # The data must be on disk before the name points to it. Otherwise a crash could leave an empty file under
            # that name.
            os.fsync(fd)
            publish(fd)
            return os.fstat(fd)
        finally:
            os.close(fd)
            if temporary is not None:
                self._drop(temporary)

    def _open_beside(self) -> tuple[int, bytes | None]:
        """Create a new file in the folder, without a name if the file system supports that.

        A file without a name disappears if the process dies. Return (descriptor, name), with the name None for a file
        without a name.
        """
        directory = self._entry.directory
        try:
            return os.open(b".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=directory), None
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
        name = _build_name()
        return os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
        ), name

    def _take_free_name(self, fd: int) -> None:
        # Use link: unlike rename, it fails if another process has created the name.
        try:
            os.link(f"/proc/self/fd/{fd}".encode(), self._entry.name, dst_dir_fd=self._entry.directory)
        except FileExistsError:
            raise self._exists() from None

    def _take_new_name(self, fd: int) -> None:
        self._take_name(fd, is_new=True)

    def _take_name(self, fd: int, old: OldFile | None = None, is_new: bool = False) -> None:
        # First give the file a temporary name, because link cannot replace a name. The rename then replaces the old
        # file in one step.
        directory = self._entry.directory
        name = _build_name() + (NEW_SUFFIX if is_new else b"")
        os.link(f"/proc/self/fd/{fd}".encode(), name, dst_dir_fd=directory)
        try:
            if old is not None:
                # Check directly before the rename, so that another process has little time to change the file in
                # between.
                self._check_unchanged(old, os.stat(self._entry.name, dir_fd=directory, follow_symlinks=False))
            os.rename(name, self._entry.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            self._drop(name)
            raise

    def _write_over(self, old: OldFile, is_known: bool) -> os.stat_result:
        if is_known:
            self._check_unchanged(old, os.fstat(old.fd))
        try:
            if self._content.size:
                # Reserve all space, including holes, before the first old byte changes. From here on, do not check for
                # a cancel or the time limit: an interruption would leave a mix of both versions.
                os.posix_fallocate(old.fd, 0, self._content.size)
        except BaseException:
            os.ftruncate(old.fd, old.status.st_size)
            raise
        os.lseek(old.fd, 0, os.SEEK_SET)
        self._copy(old.fd, interruptible=False)
        os.ftruncate(old.fd, self._content.size)
        if self._mode is not None:
            os.fchmod(old.fd, self._mode)
        if self._finish is not None:
            self._finish(old.fd)
        os.fsync(old.fd)
        return os.fstat(old.fd)

    def _copy(self, fd: int, interruptible: bool = True) -> None:
        for block in self._content.blocks():
            if interruptible:
                self._watch.check()
            rest = block
            while rest:
                rest = rest[os.write(fd, rest) :]

    def _check_unchanged(self, old: OldFile, now: os.stat_result) -> None:
        before = old.status
        if (before.st_ino, before.st_size, before.st_mtime_ns) != (now.st_ino, now.st_size, now.st_mtime_ns):
            raise RequestFailure(
                STALE_FILE,
                f"{self._entry.shown}: changed while its new version was made, and was not written; read it again",
            )

    def _drop(self, name: bytes) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._entry.directory)

    @contextlib.contextmanager
    def _described(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise self._no_space() from None
            if error.errno == errno.EPERM and not os.fstat(self._entry.directory).st_nlink:
                # Some file systems report a removed folder with EPERM.
                error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if error.errno == errno.EFBIG:
                raise RequestFailure(
                    NO_SPACE,
                    f"{self._entry.shown}: {self._content.size} bytes exceed the limit of a file; use bash_tool",
                ) from None
            raise describe_os_error(error, self._entry.shown) from None

    def _no_space(self) -> RequestFailure:
        room = os.fstatvfs(self._entry.directory)
        free = room.f_bavail * room.f_frsize
        is_out_of_names = room.f_files and not room.f_favail
        reason = (
            "no room for another file"
            if is_out_of_names
            else f"{self._content.size} bytes are to be written and {free} bytes are free"
        )
        return RequestFailure(
            NO_SPACE,
            f"{self._entry.shown}: no space left: {reason}; nothing was changed; remove files that you do not need, "
            f"then try again",
        )

    def _exists(self) -> RequestFailure:
        return RequestFailure(FILE_EXISTS, f"{self._entry.shown}: exists already")


def _build_name() -> bytes:
    return TEMPORARY_PREFIX + os.urandom(12).hex().encode()
