"""Bodies unpacked within bounds: what a body may become is counted inside the decoder, piece by piece."""

import zlib
from collections.abc import Iterator

from contract.errors import ErrorCode, ToolFailure
from workers.web.limits import FetchLimits

ACCEPTED = "gzip, deflate"
_GZIP = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 256 * 1024


class BodyDecoder:
    """One layer of `encoding`, a Content-Encoding. Raises ToolFailure(NETWORK_ERROR) for one that was not asked for."""

    def __init__(self, encoding: str, limits: FetchLimits) -> None:
        self._limits = limits
        self._encoding = encoding.strip().lower()
        if self._encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR,
                f"the body is packed as {self._encoding[:40]!r}, but only one layer of {ACCEPTED} was asked for",
            )
        self._is_packed = self._encoding not in ("", "identity")
        self._inflater: zlib._Decompress | None = None
        self._held = b""
        self.packed = 0
        self.unpacked = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The next pieces, each bounded. Raises ToolFailure: FILE_TOO_LARGE past a cap, NETWORK_ERROR for what cannot
        be unpacked.
        """
        self.packed += len(data)
        if not self._is_packed:
            yield self._counted(data)
            return
        try:
            yield from self._inflate(data)
        except zlib.error:
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR, f"the body is not the {self._encoding} that its header says"
            ) from None

    def finish(self) -> None:
        """Raises ToolFailure(NETWORK_ERROR) when the body ended too early."""
        if self._is_packed and self.packed and (self._held or self._inflater is None or not self._inflater.eof):
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR, f"the body ended in the middle of its {self._encoding} data", cause="reset"
            )

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        data = self._held + data
        self._held = b""
        is_full = False
        while data or is_full:
            if self._inflater is None or self._inflater.eof:
                if self._inflater is not None and not (self._is_gzip() and data[:1] == b"\x1f"):
                    # Padding behind the end, which other readers drop as well.
                    return
                if len(data) < 2:
                    self._held = data
                    return
                self._inflater = zlib.decompressobj(self._window_bits(data))
            piece = self._inflater.decompress(data, _PIECE_BYTES)
            yield self._counted(piece)
            # With all input taken, more may come out than fitted into this piece.
            is_full = len(piece) == _PIECE_BYTES and not self._inflater.eof
            data = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail

    def _is_gzip(self) -> bool:
        return self._encoding != "deflate"

    def _window_bits(self, data: bytes) -> int:
        """`deflate` means zlib by the standard, and bare deflate by what many servers send."""
        if self._is_gzip():
            return _GZIP
        is_zlib = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
        return zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS

    def _counted(self, piece: bytes) -> bytes:
        self.unpacked += len(piece)
        if self.unpacked > self._limits.decoded_bytes:
            raise too_large(f"it is more than {self._limits.decoded_bytes} bytes unpacked")
        if self._is_packed and self.unpacked > max(self._limits.ratio_floor_bytes, self._limits.ratio * self.packed):
            raise too_large(f"it unpacks to more than {self._limits.ratio} times its size")
        return piece


def too_large(why: str) -> ToolFailure:
    """The refusal of a body for its size."""
    return ToolFailure(
        ErrorCode.FILE_TOO_LARGE, f"the page is too large: {why}; fetch a smaller page, or one part of it"
    )
