"""Compute SHA-256 digests.

Small contents use the interpreter's own code, because loading the OpenSSL library takes longer than the digest.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Digest(Protocol):
        """Digest to which data can still be added."""

        def update(self, data: bytes | memoryview, /) -> None: ...

        def digest(self) -> bytes: ...


_LARGE = 1_048_576
"""Size in bytes from which OpenSSL is used.

OpenSSL is several times as fast and lets other threads run at the same time.
"""


OWN_CODE = ("_sha2", "_sha256")
"""Modules with the interpreter's own code: `_sha2` since Python 3.12, `_sha256` before."""


def new_digest(size: int) -> Digest:
    """Return a new SHA-256 digest object for about `size` bytes of data."""
    digest: Digest
    for library in (*OWN_CODE, "hashlib") if size < _LARGE else ("hashlib",):
        try:
            digest = __import__(library).sha256()
            break
        except ImportError:
            continue
    return digest


def digest_of(*parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 digest of a content in one or several parts."""
    digest = new_digest(sum(map(len, parts)))
    for part in parts:
        digest.update(part)
    return digest.digest()


class RunningDigest:
    """SHA-256 digest of some bytes.

    For a large content, a thread computes the digest while the caller writes the content.

    The digest and the write take about the same time, and neither holds the interpreter lock. The caller must always
    call `result`, even if the digest is no longer needed; otherwise the thread may still run when the call ends.
    """

    __slots__ = ("_done", "_parts", "_result")

    def __init__(self, parts: tuple[bytes | memoryview, ...]) -> None:
        self._parts = parts
        self._result: bytes | None = None
        self._done = _thread.allocate_lock()
        if sum(map(len, parts)) < _LARGE:
            return
        self._done.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:
            # The sandbox has no room for another thread. `result` then computes the digest.
            self._done.release()

    def result(self) -> bytes:
        # The thread releases the lock when it ends, so acquiring the lock waits for the thread.
        with self._done:
            # There is no result yet for a small content, without a thread, or after an error in the thread.
            self._result = self._result or digest_of(*self._parts)
            return self._result

    def _run(self) -> None:
        try:
            self._result = digest_of(*self._parts)
        finally:
            self._done.release()
