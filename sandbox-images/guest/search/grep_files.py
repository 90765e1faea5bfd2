"""Open one file for a search, so that no other file can take its place, and read its text as UTF-8."""

from __future__ import annotations

import os
import stat

from guest.confinement import open_pinned
from guest.kernel import open_beneath

MAX_NAMED_BYTES = 64 << 20
"""Maximum size of a file that the request names. Files found by the walk have the limit MAX_FOUND_BYTES."""
MAX_FOUND_BYTES = 10 << 20
_PIN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
HEAD_BYTES = 8192
_UTF_8_BOM = b"\xef\xbb\xbf"
_UTF_16_BOMS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_UTF_32_BOM = b"\xff\xfe\x00\x00"
_BLOCK = 1 << 20


def open_file(folder: int, path: bytes, use_openat2: bool) -> int:
    """Open a regular file below a directory for reading. Links may not lead out of the directory. Raises OSError."""
    # Pin the file (O_PATH) and check its type before it is opened: a FIFO or device that replaces the file meanwhile is
    # never opened.
    pinned = open_beneath(folder, path, os.O_PATH | os.O_NOFOLLOW) if use_openat2 else _step_to(folder, path)
    try:
        if not stat.S_ISREG(os.fstat(pinned).st_mode):
            raise OSError(0, "not a regular file")
        return open_pinned(pinned, os.O_RDONLY)
    finally:
        os.close(pinned)


def has_binary_head(path: bytes) -> bool:
    """Return whether the file is binary: it has a NUL near its start and no UTF-16 byte order mark. A missing file is
    not binary.

    `path` is relative to the current directory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_binary(os.read(fd, HEAD_BYTES))
    except OSError:
        return False
    finally:
        os.close(fd)


def is_binary(head: bytes) -> bool:
    return b"\0" in head and (head[:2] not in _UTF_16_BOMS or head.startswith(_UTF_32_BOM))


def read_text(fd: int) -> bytes:
    """Return the text of an open file in the form in which ripgrep searches it, so that ripgrep's offsets are valid in
    it.

    UTF-16 with a byte order mark is converted to UTF-8; other bytes stay unchanged, even invalid UTF-8. The byte order
    mark is removed.
    """
    blocks = []
    at = 0
    while at < MAX_NAMED_BYTES and (block := os.pread(fd, _BLOCK, at)):
        blocks.append(block)
        at += len(block)
    data = b"".join(blocks)
    encoding = _UTF_16_BOMS.get(data[:2])
    if encoding is not None:
        return data[2:].decode(encoding, "replace").encode("utf-8", "replace")
    return data.removeprefix(_UTF_8_BOM)


def _step_to(folder: int, path: bytes) -> int:
    """Return a descriptor of the path, opened part by part without following any link. Raises OSError."""
    *parts, name = path.split(b"/")
    fd = os.dup(folder)
    try:
        for part in parts:
            fd, above = os.open(part, _PIN | os.O_DIRECTORY, dir_fd=fd), fd
            os.close(above)
        return os.open(name, _PIN, dir_fd=fd)
    finally:
        os.close(fd)
