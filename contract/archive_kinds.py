"""Detection of the kind of an archive or a git bundle from the first bytes of a file."""

import tarfile

HEAD_BYTES = tarfile.BLOCKSIZE
"""Number of bytes from the start of a file that `find_kind` needs."""
SUPPORTED_KINDS = "an archive (.tar, .tar.gz, .tar.bz2, .tar.xz, .zip) or a git bundle"
_MAGIC = (
    (b"\x1f\x8b", "tar.gz"),
    (b"BZh", "tar.bz2"),
    (b"\xfd7zXZ\x00", "tar.xz"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"# v2 git bundle\n", "bundle"),
    (b"# v3 git bundle\n", "bundle"),
)


def find_kind(head: bytes) -> str | None:
    """Return the kind of a file from its first bytes; None for an unknown kind. Decompresses nothing."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    return "tar" if is_tar(head[:HEAD_BYTES]) else None


def is_tar(block: bytes) -> bool:
    """Return whether a tar archive can begin with this block."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True
