"""Decompression of response bodies within limits. The decoder counts the output piece by piece, so a decompression
bomb never fills the memory.
"""

import zlib
from collections.abc import Iterator

from contract.errors import ErrorCode, ToolFailure
from workers.web.limits import FetchLimits

ACCEPTED = "gzip, deflate"
_GZIP = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 256 * 1024


class BodyDecoder:
    """Decoder of one layer of `encoding`, a Content-Encoding. Raises ToolFailure(NETWORK_ERROR): for an encoding that
    the request did not ask for.
    """

    def __init__(self, encoding: str, limits: FetchLimits) -> None:
        self._limits = limits
        self._encoding = encoding.strip().lower()
        if self._encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR,
                f"the body is compressed as {self._encoding[:40]!r}, but only one layer of {ACCEPTED} was requested",
            )
        self._is_packed = self._encoding not in ("", "identity")
        self._inflater: zlib._Decompress | None = None
        self._unread = b""
        self.packed = 0
        self.unpacked = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the next decoded pieces, each of bounded size. Raises ToolFailure: FILE_TOO_LARGE past a limit,
        NETWORK_ERROR for data that cannot be decompressed.
        """
        self.packed += len(data)
        if not self._is_packed:
            yield self._counted(data)
            return
        try:
            yield from self._inflate(data)
        except zlib.error:
            raise ToolFailure(ErrorCode.NETWORK_ERROR, f"the body is not valid {self._encoding} data") from None

    def finish(self) -> None:
        """Raise ToolFailure(NETWORK_ERROR) if the body ended too early."""
        if self._is_packed and self.packed and (self._unread or self._inflater is None or not self._inflater.eof):
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR, f"the body ended in the middle of its {self._encoding} data", cause="reset"
            )

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        data = self._unread + data
        self._unread = b""
        is_full = False
        while data or is_full:
            if self._inflater is None or self._inflater.eof:
                if self._inflater is not None and not (self._is_gzip() and data[:1] == b"\x1f"):
                    # Data after the end is padding. Other readers ignore it too.
                    return
                if len(data) < 2:
                    self._unread = data
                    return
                self._inflater = zlib.decompressobj(self._window_bits(data))
            piece = self._inflater.decompress(data, _PIECE_BYTES)
            yield self._counted(piece)
            # A full piece means that the decoder may hold more output, even if it has consumed all input.
            is_full = len(piece) == _PIECE_BYTES and not self._inflater.eof
            data = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail

    def _is_gzip(self) -> bool:
        return self._encoding != "deflate"

    def _window_bits(self, data: bytes) -> int:
        """Return the window size for zlib. In the standard `deflate` means the zlib format, but many servers send raw
        deflate.
        """
        if self._is_gzip():
            return _GZIP
        is_zlib = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
        return zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS

    def _counted(self, piece: bytes) -> bytes:
        self.unpacked += len(piece)
        if self.unpacked > self._limits.decoded_bytes:
            raise too_large(f"it is more than {self._limits.decoded_bytes} bytes after decompression")
        # Small bodies are exempt from the ratio: a short, repetitive page compresses well and is harmless.
        if self._is_packed and self.unpacked > max(self._limits.ratio_floor_bytes, self._limits.ratio * self.packed):
            raise too_large(f"it decompresses to more than {self._limits.ratio} times its size")
        return piece


def too_large(reason: str) -> ToolFailure:
    """Return the failure for a body that is too large."""
    return ToolFailure(
        ErrorCode.FILE_TOO_LARGE, f"the page is too large: {reason}; fetch a smaller page, or one part of it"
    )
