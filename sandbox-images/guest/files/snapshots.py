"""What this session last read or wrote of each file, kept so that a change by somebody else is noticed.

The folder belongs to the sandbox's user: a program may delete, fill or forge it. Then there is nothing to compare with,
and no request fails for it.
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

    from guest.confinement import Place
    from guest.paths import GuestPaths

MAX_DATA_BYTES = 1_048_576
"""Content of a larger file is not kept, only its digest."""
MAX_TOTAL_BYTES = 16_777_216
_KEPT_BYTES = 12_582_912
_PAGE = 4096
# Between two sweeps; with what a sweep keeps it makes the total.
_SWEEP_PAGES = (MAX_TOTAL_BYTES - _KEPT_BYTES) // _PAGE
_MAX_ENTRIES = 8192
_DIGEST_BYTES = 32
_LEDGER = b"ledger"
_HAS_DATA = b"\1"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A name that was swapped for a FIFO or a link must neither wait nor lead away.
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Snapshot:
    """A file as this session knows it: the sha256 of its whole content, the content unless it was too large, and the
    time of its last change.
    """

    __slots__ = ("_data", "changed_ns", "digest")

    def __init__(self, digest: bytes, data: bytes | None, changed_ns: int) -> None:
        self.digest = digest
        self.changed_ns = changed_ns
        self._data = data

    @property
    def data(self) -> bytes | None:
        """The content; None when it was not kept, or is not what it was."""
        return self._data if self._data is not None and digest_of(self._data) == self.digest else None


def key_of(place: Place) -> bytes:
    """The path that a place's file is remembered by: links and `..` are resolved, so that every spelling agrees."""
    return os.readlink(f"/proc/self/fd/{place.directory}".encode()) + b"/" + place.name


def remember(paths: GuestPaths, path: bytes, digest: bytes, data: bytes | None, changed_ns: int) -> bool:
    """Keep what a file is that was last changed (its ctime) at `changed_ns`. Where that fails what was known before is
    dropped, and nothing is known.

    False when even that fails: what was known before is still held against the file, and always would be.
    """
    kept = data if data is not None and len(data) <= MAX_DATA_BYTES else None
    record = digest + (_HAS_DATA + kept if kept is not None else b"")
    try:
        with _open_folder(paths) as folder:
            _put(folder, _name_of(path), record, changed_ns)
            _count(folder, len(record))
    except OSError:
        forget(paths, path)
        return recall(paths, path) is None
    return True


def recall(paths: GuestPaths, path: bytes) -> Snapshot | None:
    """What `remember` kept of a file; None when there is nothing that can be believed."""
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
    """Know nothing of a file any more, as far as the folder lets go."""
    with contextlib.suppress(OSError), _open_folder(paths) as folder:
        os.unlink(_name_of(path), dir_fd=folder)


@contextlib.contextmanager
def _open_folder(paths: GuestPaths) -> Iterator[int]:
    """The folder of the records, made when it is missing."""
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
    """Write a record whole or not at all. Its own time of change is that of the file it is of."""
    temporary = b"new-" + os.urandom(8).hex().encode()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=folder)
    try:
        if os.write(fd, record) < len(record):
            raise OSError("no room for a record")
        os.utime(fd, ns=(changed_ns, changed_ns))
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(fd)


def _get(folder: int, name: bytes) -> tuple[bytes, int]:
    """A record, and when the file it is of was changed."""
    fd = os.open(name, os.O_RDONLY | _PLAIN, dir_fd=folder)
    try:
        status = os.fstat(fd)
        is_plain = stat.S_ISREG(status.st_mode)
        return os.read(fd, _DIGEST_BYTES + 1 + MAX_DATA_BYTES) if is_plain else b"", status.st_mtime_ns
    finally:
        os.close(fd)


def _count(folder: int, size: int) -> None:
    """Add to what was written since the last sweep, and sweep when that is enough.

    The ledger has a byte for each page: appending counts right for any number of processes, and nothing has to be read.
    """
    fd = os.open(_LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _PLAIN, 0o600, dir_fd=folder)
    try:
        os.write(fd, b"." * (size // _PAGE + 1))
        if os.fstat(fd).st_size > _SWEEP_PAGES:
            os.ftruncate(fd, 0)
            _sweep(folder)
    finally:
        os.close(fd)


def _sweep(folder: int) -> None:
    """Drop the oldest records until the rest is small enough."""
    found = []
    listing = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(listing) as entries:
            for entry in itertools.islice(entries, _MAX_ENTRIES):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_ctime_ns, status.st_size // _PAGE * _PAGE + _PAGE, entry.name))
    finally:
        os.close(listing)
    total = 0
    for _, size, name in sorted(found, reverse=True):
        total += size
        if total > _KEPT_BYTES and name != _LEDGER.decode():
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
