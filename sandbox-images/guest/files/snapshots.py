"""Store what this session last read or wrote of each file, to detect changes by other processes.

The folder belongs to the user of the sandbox, so a program may delete, fill or forge the records. Without a valid
record, changes are not detected. No request fails because of a missing or invalid record.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat

from guest.files.sha256 import digest_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from guest.confinement import DirectoryEntry
    from guest.paths import GuestPaths

MAX_DATA_BYTES = 1_048_576
"""Maximum size of a stored content, in bytes. For a larger file only the digest is stored."""
MAX_TOTAL_BYTES = 16_777_216
_SWEEP_TARGET_BYTES = 12_582_912
_PAGE = 4096
# Number of pages that are written between two sweeps. The maximum total is this plus the records that a sweep keeps.
_SWEEP_PAGES = (MAX_TOTAL_BYTES - _SWEEP_TARGET_BYTES) // _PAGE
_MAX_ENTRIES = 8192
_DIGEST_BYTES = 32
_LEDGER = b"ledger"
_HAS_DATA = b"\1"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A program may replace a record by a FIFO or a link. Opening a record must neither block nor lead out of the folder.
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Snapshot:
    """Record of a file as this session knows it.

    It has the SHA-256 digest of the content, the time of the file's last change (ctime, in nanoseconds), and the
    content if it was not too large.
    """

    __slots__ = ("_data", "changed_ns", "digest")

    def __init__(self, digest: bytes, data: bytes | None, changed_ns: int) -> None:
        self.digest = digest
        self.changed_ns = changed_ns
        self._data = data

    @property
    def data(self) -> bytes | None:
        """The content, or None if the content was not stored or does not match the digest."""
        return self._data if self._data is not None and digest_of(self._data) == self.digest else None


def key_of(entry: DirectoryEntry) -> bytes:
    """Return the path of a file by which its record is found.

    Links and `..` are resolved, so every spelling gives the same key.
    """
    return os.readlink(f"/proc/self/fd/{entry.directory}".encode()) + b"/" + entry.name


def remember(paths: GuestPaths, path: bytes, digest: bytes, data: bytes | None, changed_ns: int) -> bool:
    """Store a record of a file whose ctime is `changed_ns`.

    If the write fails, the earlier record is deleted and nothing is known about the file. Returns False if the deletion
    fails too: the earlier record then stays and would make every later comparison report a change.
    """
    is_stored = data if data is not None and len(data) <= MAX_DATA_BYTES else None
    record = digest + (_HAS_DATA + is_stored if is_stored is not None else b"")
    try:
        with _open_folder(paths) as folder:
            _put(folder, _name_of(path), record, changed_ns)
            _count(folder, len(record))
    except OSError:
        forget(paths, path)
        return recall(paths, path) is None
    return True


def recall(paths: GuestPaths, path: bytes) -> Snapshot | None:
    """Return what `remember` stored about a file, or None if there is no valid record."""
    try:
        with _open_folder(paths) as folder:
            record, changed_ns = _get(folder, _name_of(path))
    except OSError:
        return None
    digest, mark, data = record[:_DIGEST_BYTES], record[_DIGEST_BYTES : _DIGEST_BYTES + 1], record[_DIGEST_BYTES + 1 :]
    if len(digest) < _DIGEST_BYTES:
        return None
    return Snapshot(digest, data if mark == _HAS_DATA else None, changed_ns)


def forget(paths: GuestPaths, path: bytes) -> None:
    """Delete the record of a file. Errors are ignored."""
    with contextlib.suppress(OSError), _open_folder(paths) as folder:
        os.unlink(_name_of(path), dir_fd=folder)


@contextlib.contextmanager
def _open_folder(paths: GuestPaths) -> Iterator[int]:
    """Open the folder of the records. Create the folder if it does not exist."""
    state = _enter(paths.state, None)
    try:
        folder = _enter(b"files", state)
    finally:
        os.close(state)
    try:
        yield folder
    finally:
        os.close(folder)


def _enter(name: bytes, parent: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, _FOLDER, dir_fd=parent)


def _name_of(path: bytes) -> bytes:
    return digest_of(path).hex().encode()


def _put(folder: int, name: bytes, record: bytes, changed_ns: int) -> None:
    """Write a record completely or not at all. The mtime of the record stores the ctime of the file it describes."""
    # The rename replaces an older record in one step, so a reader never sees a partial record.
    temporary = b"new-" + os.urandom(8).hex().encode()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=folder)
    try:
        if os.write(fd, record) < len(record):
            raise OSError("the record was not written completely")
        os.utime(fd, ns=(changed_ns, changed_ns))
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(fd)


def _get(folder: int, name: bytes) -> tuple[bytes, int]:
    """Return (record, ctime of the file that the record describes)."""
    fd = os.open(name, os.O_RDONLY | _PLAIN, dir_fd=folder)
    try:
        status = os.fstat(fd)
        # Only a regular file is read. The file behind the name may be a FIFO or a device that another program put
        # there.
        is_plain = stat.S_ISREG(status.st_mode)
        return os.read(fd, _DIGEST_BYTES + 1 + MAX_DATA_BYTES) if is_plain else b"", status.st_mtime_ns
    finally:
        os.close(fd)


def _count(folder: int, size: int) -> None:
    """Add `size` to the amount written since the last sweep, and sweep if the limit is reached.

    The ledger is a file with one byte for each page written; its size is the count. So appends of several processes are
    all counted, and no content is read.
    """
    fd = os.open(_LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _PLAIN, 0o600, dir_fd=folder)
    try:
        os.write(fd, b"." * (size // _PAGE + 1))
        if os.fstat(fd).st_size > _SWEEP_PAGES:
            # Empty the ledger before the sweep, so that other processes do not start a sweep too.
            os.ftruncate(fd, 0)
            _sweep(folder)
    finally:
        os.close(fd)


def _sweep(folder: int) -> None:
    """Delete the oldest records until the remaining records are small enough."""
    snapshots = []
    listing = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(listing) as entries:
            # Limit the entries, because a program may have filled the folder with many.
            for entry in itertools.islice(entries, _MAX_ENTRIES):
                status = entry.stat(follow_symlinks=False)
                snapshots.append((status.st_ctime_ns, status.st_size // _PAGE * _PAGE + _PAGE, entry.name))
    finally:
        os.close(listing)
    total = 0
    for _, size, name in sorted(snapshots, reverse=True):
        total += size
        if total > _SWEEP_TARGET_BYTES and name != _LEDGER.decode():
            # A parallel sweep may have deleted the same record.
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
