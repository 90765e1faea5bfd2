"""SHA-256 digests by a C module of the interpreter: the guest's Python has no OpenSSL, which `hashlib` loads."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Digest(Protocol):
        """Digest to which data can still be added."""

        def update(self, data: bytes | memoryview, /) -> None: ...

        def digest(self) -> bytes: ...


OWN_CODE = ("_sha2", "_sha256")
"""C modules of the interpreter with SHA-256: `_sha2` since Python 3.12, `_sha256` before."""


def new_digest() -> Digest:
    """Return a new SHA-256 digest object. Raises ImportError if this Python has neither module of OWN_CODE."""
    try:
        digest: Digest = __import__(OWN_CODE[0]).sha256()
    except ImportError:
        digest = __import__(OWN_CODE[1]).sha256()
    return digest


def digest_of(*parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 digest of a content in one or several parts."""
    digest = new_digest()
    for part in parts:
        digest.update(part)
    return digest.digest()
