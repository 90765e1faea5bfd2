"""Compare files with the content that the session last saw, and store the content that the session sees."""

from __future__ import annotations

import os

from guest.failures import FILE_TOO_LARGE, STALE_FILE, RequestFailure
from guest.files.file_texts import FileText
from guest.files.sha256 import digest_of
from guest.files.snapshots import MAX_DATA_BYTES, Snapshot, forget, key_of, recall, remember

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.confinement import DirectoryEntry
    from guest.paths import GuestPaths
    from guest.request_context import Watch

MAX_BYTES = 33_554_432
"""Maximum size of a file that is compared and remembered, in bytes."""
_DIFF_CHARS = 2800
_PATH_CHARS = 120


def read_whole(fd: int, shown: str, watch: Watch) -> bytes:
    """Return the content of a file.

    Raises RequestFailure(FILE_TOO_LARGE) before the read, or if the file grows beyond the limit.
    """
    size = os.fstat(fd).st_size
    blocks: list[bytes] = []
    read = 0
    # Try one read for the whole file, which is enough if no other process changes the file. Joining several blocks
    # takes as long as reading them.
    while size <= MAX_BYTES:
        watch.check()
        block = os.pread(fd, size - read or 1, read)
        if not block:
            return blocks[0] if len(blocks) == 1 else b"".join(blocks)
        blocks.append(block)
        read += len(block)
        size = max(size, read)
    raise RequestFailure(FILE_TOO_LARGE, f"{shown}: has {size} bytes, more than {MAX_BYTES}: use bash_tool", size=size)


class FileState:
    """This session's stored record of the file at a `DirectoryEntry`."""

    __slots__ = ("_path", "_paths", "_snapshot")

    def __init__(self, entry: DirectoryEntry, paths: GuestPaths) -> None:
        self._paths = paths
        self._path = key_of(entry)
        self._snapshot: Snapshot | None = recall(paths, self._path)

    @property
    def is_known(self) -> bool:
        return self._snapshot is not None

    @property
    def known_data(self) -> bytes | None:
        """The content that the session last read or wrote, or None if the content was not stored."""
        return self._snapshot.data if self._snapshot is not None else None

    def is_touched(self, status: os.stat_result) -> bool:
        """Return whether the time of the last change (ctime) differs from the record. This is much faster than
        `is_stale`.
        """
        return self._snapshot is not None and status.st_ctime_ns != self._snapshot.changed_ns

    def is_stale(self, data: bytes) -> bool:
        """Return whether another process changed the file to `data` since this session read or wrote it."""
        return self._snapshot is not None and self._snapshot.digest != digest_of(data)

    def describe_since(self, data: bytes) -> tuple[bytes, str] | None:
        """Return (content that the session last saw, diff to `data`), or None without a change.

        The content is empty if it was not stored.
        """
        if not self.is_stale(data):
            return None
        known_data = self.known_data
        return known_data or b"", describe_change(known_data, data)

    def record(self, pieces: tuple[bytes | memoryview, ...], status: os.stat_result) -> bool:
        """Record `content`, which may be in pieces, as what the session last read or wrote.

        Return False if an older record could be neither replaced nor deleted. The caller must then not reject a call
        because of this record.
        """
        size = sum(map(len, pieces))
        if size <= MAX_BYTES:
            data = b"".join(pieces) if size <= MAX_DATA_BYTES else None
            return remember(self._paths, self._path, digest_of(*pieces), data, status.st_ctime_ns)
        self.forget()
        return True

    def forget(self) -> None:
        forget(self._paths, self._path)


def describe_stale(shown: str, known_data: bytes | None, data: bytes) -> RequestFailure:
    """Return the failure for a file that is `data` now and was `known_data` when this session last saw it."""
    message = (
        f"{shorten(shown)}: changed since this session last read or wrote it; nothing was written. Check the change "
        "below, then send the call again, adapted or unchanged."
    )
    diff = describe_change(known_data, data)
    return RequestFailure(STALE_FILE, f"{message}\n{diff}")


def describe_change(known_data: bytes | None, data: bytes) -> str:
    """Return a diff of a change by another process, short enough for an error message."""
    try:
        text = FileText(data, "")
        before = FileText(known_data, "", text.form) if known_data is not None else None
    except RequestFailure:
        return "[not text: no diff]"
    if before is None:
        return "[its content then was not stored: no diff; read it with read_tool]"
    # Imported only here: few calls meet such a change, and a new process often serves each call.
    from guest.files.diffs import build_diff

    diff = build_diff(before.body, text.body, text.decode, max_chars=_DIFF_CHARS)
    if not diff.text:
        return "[only line ends or the byte order mark changed]"
    return diff.text if diff.is_whole else f"{diff.text}\n[diff cut; read the file with read_tool]"


def shorten(shown: str) -> str:
    """Shorten a long path in the middle, so that an error message has room for the explanation."""
    return shown if len(shown) <= 2 * _PATH_CHARS else f"{shown[:_PATH_CHARS]}[...]{shown[-_PATH_CHARS:]}"
