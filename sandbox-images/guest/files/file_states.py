"""What the session knows of a file, held against what the file is: whole contents read, compared and noted."""

from __future__ import annotations

import os

from guest.failures import FILE_TOO_LARGE, STALE_FILE, Failure
from guest.files.file_texts import FileText
from guest.files.sha256 import digest_of
from guest.files.snapshots import MAX_DATA_BYTES, Snapshot, forget, key_of, recall, remember

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.confinement import Place
    from guest.paths import GuestPaths
    from guest.supervisors import Watch

MAX_BYTES = 33_554_432
"""A larger file is neither compared nor noted."""
_DIFF_CHARS = 2800
_PATH_CHARS = 120


def read_whole(fd: int, shown: str, watch: Watch) -> bytes:
    """A file's content. Raises Failure(FILE_TOO_LARGE) before it is read, or when it grows beyond that."""
    size = os.fstat(fd).st_size
    blocks: list[bytes] = []
    read = 0
    # At once when nothing changes it meanwhile: joining blocks takes as long as reading them.
    while size <= MAX_BYTES:
        watch.check()
        block = os.pread(fd, size - read or 1, read)
        if not block:
            return blocks[0] if len(blocks) == 1 else b"".join(blocks)
        blocks.append(block)
        read += len(block)
        size = max(size, read)
    raise Failure(FILE_TOO_LARGE, f"{shown}: has {size} bytes, more than {MAX_BYTES}: use bash_tool", size=size)


class FileState:
    """What this session remembers of the file at a place."""

    __slots__ = ("_known", "_path", "_paths")

    def __init__(self, place: Place, paths: GuestPaths) -> None:
        self._paths = paths
        self._path = key_of(place)
        self._known: Snapshot | None = recall(paths, self._path)

    @property
    def is_known(self) -> bool:
        return self._known is not None

    @property
    def known_data(self) -> bytes | None:
        """The content that was last read or written, where it was kept."""
        return self._known.data if self._known is not None else None

    def is_touched(self, status: os.stat_result) -> bool:
        """Whether anything may have happened to the file since it was noted: far quicker to say than is_stale."""
        return self._known is not None and status.st_ctime_ns != self._known.changed_ns

    def is_stale(self, data: bytes) -> bool:
        """Whether the file has become `data` by somebody else's doing since this session read or wrote it."""
        return self._known is not None and self._known.digest != digest_of(data)

    def describe_since(self, data: bytes) -> tuple[bytes, str] | None:
        """What the file was when the session last saw it (empty when that was not kept), and what changed since; None
        when nothing did.
        """
        if not self.is_stale(data):
            return None
        known = self.known_data
        return known or b"", describe_change(known, data)

    def note(self, data: bytes, status: os.stat_result) -> bool:
        """The session knows the file as `data` now. False when something else would still be held against it: then
        nothing may be.
        """
        return self.note_pieces((data,), digest_of(data), status)

    def note_pieces(self, pieces: tuple[bytes | memoryview, ...], digest: bytes, status: os.stat_result) -> bool:
        """As `note`, for a content in pieces whose digest was made already."""
        size = sum(map(len, pieces))
        if size <= MAX_BYTES:
            data = b"".join(pieces) if size <= MAX_DATA_BYTES else None
            return remember(self._paths, self._path, digest, data, status.st_ctime_ns)
        self.forget()
        return True

    def forget(self) -> None:
        forget(self._paths, self._path)


def describe_stale(shown: str, known: bytes | None, data: bytes) -> Failure:
    """The failure for a file that is `data` now and was `known` when this session last saw it."""
    words = (
        f"{shorten(shown)}: changed since this session last read or wrote it, and was left as it is. Mind the change, "
        "then send the call again, adapted or as it is: it will be carried out."
    )
    diff = describe_change(known, data)
    return Failure(STALE_FILE, f"{words}\n{diff}")


def describe_change(known: bytes | None, data: bytes) -> str:
    """What somebody else did to a file, short enough for an error."""
    try:
        text = FileText(data, "")
        before = FileText(known, "", text.form) if known is not None else None
    except Failure:
        return "[not text: no diff]"
    if before is None:
        return "[its content then was not kept: no diff; read it with read_tool]"
    # Few calls meet such a change, and the process that serves one is often new.
    from guest.files.diffs import build_diff

    diff = build_diff(before.body, text.body, text.decode, max_chars=_DIFF_CHARS)
    if not diff.text:
        return "[only line ends or the byte order mark changed]"
    return diff.text if diff.is_whole else f"{diff.text}\n[diff cut; read the file with read_tool]"


def shorten(shown: str) -> str:
    """A path that leaves room for what is said about it."""
    return shown if len(shown) <= 2 * _PATH_CHARS else f"{shown[:_PATH_CHARS]}[...]{shown[-_PATH_CHARS:]}"
