"""The client's bytes of one stream, which wait until a pipe or a socket accepts them."""

from __future__ import annotations

from guest.kernel import WRITE_LATER
from guest.streams.frames import BULK_WINDOW_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class ClientBytes:
    """Bytes of the client, in order. At most a window of them waits: the client may send more when some have left."""

    __slots__ = ("_expected", "_grant", "_waiting")

    def __init__(self, grant: Callable[[int], None]) -> None:
        self._grant = grant
        self._waiting = bytearray()
        # Bytes that the client may still send.
        self._expected = 0

    def __bool__(self) -> bool:
        """Return whether bytes wait."""
        return bool(self._waiting)

    def add(self, data: bytes, header: bytes = b"") -> None:
        """Take bytes of the client. `header` goes before them."""
        self._expected -= len(data)
        self._waiting += header + data

    def write(self, write: Callable[[bytearray], int]) -> None:
        """Write as much as is accepted now, then let the client send more. Raises OSError."""
        try:
            while self._waiting:
                del self._waiting[: write(self._waiting)]
        except OSError as error:
            if error.errno not in WRITE_LATER:
                raise
        self.grant()

    def grant(self) -> None:
        """Let the client send until a window of bytes waits or is on its way."""
        count = BULK_WINDOW_BYTES - self._expected - len(self._waiting)
        if count > 0:
            self._expected += count
            self._grant(count)

    def clear(self) -> None:
        """Drop the bytes: their reader has left."""
        self._waiting.clear()
