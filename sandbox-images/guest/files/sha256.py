"""sha256 of contents: by the interpreter's own code for what is small, because OpenSSL's library takes longer to load
than that.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Digest(Protocol):
        """A digest under way."""

        def update(self, data: bytes | memoryview, /) -> None: ...

        def digest(self) -> bytes: ...


_LARGE = 1_048_576
"""From here on OpenSSL, several times as fast and with other threads beside it, makes up for its loading."""


OWN_CODE = ("_sha2", "_sha256")
"""The module of the interpreter's own code: since Python 3.12, and before."""


def new_digest(size: int) -> Digest:
    """A sha256 that is to take about so many bytes."""
    digest: Digest
    for library in (*OWN_CODE, "hashlib") if size < _LARGE else ("hashlib",):
        try:
            digest = __import__(library).sha256()
            break
        except ImportError:
            continue
    return digest


def digest_of(*parts: bytes | memoryview) -> bytes:
    """The sha256 of a content that is in one part or in several."""
    digest = new_digest(sum(map(len, parts)))
    for part in parts:
        digest.update(part)
    return digest.digest()


class RunningDigest:
    """The sha256 of some bytes, of a large content made while that is written: both take about as long, and neither
    needs the interpreter.

    Who starts one asks for its `result` also when it is not needed any more: then nothing runs on.
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
            # The sandbox has no room for another thread.
            self._done.release()

    def result(self) -> bytes:
        with self._done:
            self._result = self._result or digest_of(*self._parts)
            return self._result

    def _run(self) -> None:
        try:
            self._result = digest_of(*self._parts)
        finally:
            self._done.release()
