"""Decompression of bodies. The output comes in pieces of bounded size, so a bomb never fills the memory."""

import zlib
from collections.abc import Iterator

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.limits import FetchLimits

ACCEPTED = "gzip, deflate"
CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
"""Values of Content-Encoding that are decoded."""
PIECE_BYTES = 64 * 1024
_GZIP = 16 + zlib.MAX_WBITS
# zlib copies the rest of its input at the end of every gzip member and of every piece. With small input steps this copy
# is cheap.
_STEP_BYTES = 4096


class Inflater:
    """Decoder of one layer of `coding`, one of CODINGS."""

    def __init__(self, coding: str) -> None:
        self._is_gzip = coding != "deflate"
        self._stream: zlib._Decompress | None = None
        self._unread = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the next decoded pieces, each of at most PIECE_BYTES. Raises zlib.error."""
        for at in range(0, len(data), _STEP_BYTES):
            yield from self._feed(data[at : at + _STEP_BYTES])

    @property
    def is_whole(self) -> bool:
        """Return whether the compressed data is complete, so that the body may end here."""
        return not self._unread and (self._stream is None or self._stream.eof)

    def _feed(self, data: bytes) -> Iterator[bytes]:
        data, self._unread = self._unread + data, b""
        is_full = False
        while data or is_full:
            if self._stream is None or self._stream.eof:
                if self._stream is not None and not (self._is_gzip and data[:1] == b"\x1f"):
                    # Ignore data after the end of the compressed stream, as other readers do.
                    return
                if len(data) < 2:
                    self._unread = data
                    return
                self._stream = zlib.decompressobj(self._find_window_bits(data))
            piece = self._stream.decompress(data, PIECE_BYTES)
            yield piece
            # A full piece means that the decoder may hold more output, even if it has consumed all input.
            is_full = len(piece) == PIECE_BYTES and not self._stream.eof
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail

    def _find_window_bits(self, data: bytes) -> int:
        """Return the window size for zlib. By the standard, `deflate` means the zlib format, but many servers send raw
        deflate data.
        """
        if self._is_gzip:
            return _GZIP
        is_zlib = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
        return zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS


class BodyDecoder:
    """Decoder of one layer of `encoding`, a Content-Encoding, within limits. Raises ToolFailure(NETWORK_ERROR) for an
    encoding that the request did not ask for.
    """

    def __init__(self, encoding: str, limits: FetchLimits) -> None:
        self._limits = limits
        self._encoding = encoding.strip().lower()
        if self._encoding not in ("", "identity", *CODINGS):
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR,
                f"the server compressed the body as {self._encoding[:40]!r}, which this tool cannot read (only "
                f"{ACCEPTED}): use another address for the content",
            )
        self._inflater = Inflater(self._encoding) if self._encoding in CODINGS else None
        self.packed = 0
        self.unpacked = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the next decoded pieces, each of bounded size. Raises ToolFailure: FILE_TOO_LARGE past a limit,
        NETWORK_ERROR for data that cannot be decompressed.
        """
        self.packed += len(data)
        try:
            for piece in self._inflater.feed(data) if self._inflater is not None else (data,):
                yield self._counted(piece)
        except zlib.error:
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR,
                f"the body is not valid {self._encoding} data: try again, or use another source",
            ) from None

    def finish(self) -> None:
        """Raise ToolFailure(NETWORK_ERROR) if the body ended too early."""
        if self._inflater is not None and not self._inflater.is_whole:
            raise ToolFailure(
                ErrorCode.NETWORK_ERROR,
                f"the body ended in the middle of its {self._encoding} data: try again, or use another source",
                cause="reset",
            )

    def _counted(self, piece: bytes) -> bytes:
        self.unpacked += len(piece)
        if self.unpacked > self._limits.decoded_bytes:
            raise too_large(f"it is more than {self._limits.decoded_bytes} bytes after decompression")
        # The limit of the ratio does not apply to small bodies: a short, repetitive page compresses well and is
        # harmless.
        is_checked = self._inflater is not None and self.unpacked > self._limits.ratio_floor_bytes
        if is_checked and self.unpacked > self._limits.ratio * self.packed:
            raise too_large(f"it decompresses to more than {self._limits.ratio} times its size")
        return piece


def too_large(reason: str) -> ToolFailure:
    """Return the failure for a body that is too large."""
    return ToolFailure(
        ErrorCode.FILE_TOO_LARGE, f"the page is too large: {reason}; fetch a smaller page, or one part of it"
    )
