"""Find the encoding of a text file.

The order is: byte order mark (BOM), UTF-8 if the bytes are valid, otherwise the most likely guess. UTF-16 and UTF-32
need a BOM, as in ripgrep; without a BOM, such a file counts as binary, unless the request names the encoding.
"""

from __future__ import annotations

import codecs

from guest.failures import BINARY_FILE, INVALID_ARGUMENTS, RequestFailure
from guest.files.file_types import find_type

BINARY_SAMPLE = 8192
"""Number of bytes at the start of a file that are searched for NUL. A file with a NUL there counts as text only if it
has a BOM.
"""
GUESS_BYTES = 65_536
"""Number of bytes after the first invalid UTF-8 byte that the guess examines. Before that byte it examines a quarter as
many.
"""

# UTF-32 comes first, because its little-endian BOM begins with the BOM of UTF-16.
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (b"\x84\x31\x95\x33", "gb18030"),
)
_BOM_OF_CODEC = {codec: bom for bom, codec in _BOMS}
# Codecs that write a BOM themselves -> the codec without a BOM, which TextForm uses, because it stores the BOM
# separately.
_MARKING = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
_BIG_ENDIAN = {"utf-16": "utf-16-be", "utf-32": "utf-32-be"}
# Excluded: Python calls these codecs text encodings, but they are for host names or source code, or convert nothing.
_NOT_FOR_FILES = frozenset(("idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "mbcs", "oem"))
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_MAX_NAME = 40


class TextForm:
    """Form in which a file stores text: a codec that neither reads nor writes a BOM, and the BOM (`b""` for none).

    `is_guess`: the file contains no proof of the codec. With the codec UTF-8 it means that some bytes are not valid
    UTF-8.
    """

    __slots__ = ("bom", "codec", "is_guess")

    def __init__(self, codec: str, bom: bytes = b"", is_guess: bool = False) -> None:
        self.codec = codec
        self.bom = bom
        self.is_guess = is_guess

    def encode(self, text: str) -> bytes:
        """Return the bytes of a text, without the BOM. Raises UnicodeEncodeError."""
        return text.encode(self.codec)

    def decode(self, data: bytes) -> str:
        """Return the text of a file or of a complete part of a file, without the BOM. Invalid bytes become U+FFFD."""
        return data[len(self.bom) if data.startswith(self.bom) else 0 :].decode(self.codec, "replace")


def find_form(data: bytes, requested: str = "auto", is_whole: bool = True) -> TextForm:
    """Return the form of a file's content.

    With `is_whole` False, `data` is the beginning of the file and may end in the middle of a character. If `requested`
    names a codec, that codec is always used.

    Raises RequestFailure: BINARY_FILE with the size of `data`, or INVALID_ARGUMENTS if `requested` is neither "auto"
    nor a text codec.
    """
    form = find_sure_form(data, requested)
    if form is not None:
        return form
    wrong = find_wrong_utf8(data, is_whole)
    if wrong is None:
        return TextForm("utf-8")
    start, end = guess_window(wrong)
    return guess_form(data[start:end], start > 0)


def find_sure_form(data: bytes, requested: str = "auto") -> TextForm | None:
    """Return the form of a file's content if a BOM or the request determines it. None: the content is UTF-8 or must be
    guessed.
    """
    if requested != "auto":
        return _find_requested_form(data, requested)
    marked = _marked_form(data)
    if marked is None and b"\0" in data[:BINARY_SAMPLE]:
        raise _binary(data)
    return marked


def find_wrong_utf8(data: bytes, is_whole: bool = True) -> int | None:
    """Return the position of the first byte that is not valid UTF-8, or None if all bytes are valid."""
    if data.isascii():
        return None
    try:
        codecs.utf_8_decode(data, "strict", is_whole)
    except UnicodeDecodeError as error:
        return error.start
    return None


def guess_window(wrong: int) -> tuple[int, int]:
    """Return the part of a file from which the encoding is guessed, as (start, end).

    `wrong` is the position of the first invalid UTF-8 byte.
    """
    return max(0, wrong - GUESS_BYTES // 4), wrong + GUESS_BYTES


def guess_form(sample: bytes, is_inner: bool) -> TextForm:
    """Return the most likely form of a part of a file that is not UTF-8.

    `is_inner`: the part may begin in the middle of a character. Raises RequestFailure(BINARY_FILE) if the part is not
    text.
    """
    if is_inner:
        # Start at a byte below 0x30, which is never the second or a later byte of a character.
        sample = sample[next((at for at, byte in enumerate(sample) if byte < 0x30), 0) :]
    elif find_type(sample) is not None:
        raise _binary(sample)
    # Imported only here: few files need a guess, and a new process often serves each call.
    from guest.files.charset_guess import guess_codec

    codec = guess_codec(sample)
    if codec is None:
        raise _binary(sample)
    return TextForm(codec, is_guess=True)


def check_codec(name: str) -> str:
    """Return the canonical name of a codec. Raises RequestFailure(INVALID_ARGUMENTS) if the codec is not for text
    files.
    """
    try:
        if not 0 < len(name) <= _MAX_NAME or not _NAME_CHARS.issuperset(name):
            raise LookupError(name)
        codec = codecs.lookup(name)
    except LookupError:
        raise _unknown(name) from None
    # Only this private attribute tells text encodings from codecs such as base64 and hex, which convert bytes to bytes.
    is_text: bool = codec._is_text_encoding
    if not is_text or codec.name.replace("-", "_") in _NOT_FOR_FILES:
        raise _unknown(name)
    return codec.name


def _find_requested_form(data: bytes, requested: str) -> TextForm:
    codec = check_codec(requested)
    marked = _marked_form(data)
    if codec in _MARKING:
        if marked is not None and marked.codec.startswith(codec.removesuffix("-sig")):
            return marked
        if not data:
            return TextForm(_MARKING[codec], _BOM_OF_CODEC[_MARKING[codec]])
        wide = _likelier_end(data, codec) if codec in _BIG_ENDIAN else _MARKING[codec]
        return TextForm(wide)
    if marked is not None and marked.codec == codec:
        return marked
    return TextForm(codec)


def _marked_form(data: bytes) -> TextForm | None:
    for bom, codec in _BOMS:
        if data.startswith(bom):
            sample = data[len(bom) : len(bom) + BINARY_SAMPLE]
            if codec.startswith("utf-8") or _is_wide_text(sample, codec):
                return TextForm(codec, bom)
    return None


def _likelier_end(data: bytes, codec: str) -> str:
    """Return the big-endian or the little-endian codec, whichever is more likely.

    In big-endian text, characters below 256 begin with NUL bytes.
    """
    width = 4 if codec == "utf-32" else 2
    sample = data[:BINARY_SAMPLE]
    first, last = sample[::width].count(0), sample[width - 1 :: width].count(0)
    return _BIG_ENDIAN[codec] if first > last else _MARKING[codec]


def _is_wide_text(sample: bytes, codec: str) -> bool:
    """Return whether the codec can decode the sample without a NUL character. The sample may be cut at its end."""
    try:
        text = codecs.getincrementaldecoder(codec)().decode(sample)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _binary(data: bytes) -> RequestFailure:
    file_type = find_type(data)
    return RequestFailure(
        BINARY_FILE, f"not text but {file_type.name if file_type is not None else 'binary data'}", size=len(data)
    )


def _unknown(name: str) -> RequestFailure:
    shown = name[:_MAX_NAME].encode("ascii", "backslashreplace").decode()
    return RequestFailure(
        INVALID_ARGUMENTS, f"there is no text encoding '{shown}'; try auto, utf-8, utf-16, gb18030 or latin-1"
    )
