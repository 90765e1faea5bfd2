"""Recognize files that are not text by their first bytes. For images, the width and height are also read."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES = 65_536
"""Number of bytes that are enough to recognize the type. The size of a JPEG may come later and is then unknown."""

_KINDS = (
    (b"\x7fELF", "an ELF program or library"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"BZh91AY&SY", "a bzip2 archive"),
    (b"\xfd7zXZ\0", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\0asm", "a WebAssembly module"),
    (b"\xca\xfe\xba\xbe", "a Java class or Mach-O program"),
    (b"\xcf\xfa\xed\xfe", "a Mach-O program"),
    (b"!<arch>\n", "an ar archive"),
    (b"OggS\0", "Ogg audio or video"),
    (b"fLaC\0", "FLAC audio"),
    (b"ID3\x03", "MP3 audio"),
    (b"ID3\x04", "MP3 audio"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"PAR1\x15", "a Parquet table"),
    (b"\0\x01\0\0\0", "a TrueType font"),
    (b"OTTO\0", "an OpenType font"),
    (b"wOFF", "a web font"),
    (b"wOF2", "a web font"),
    (b"MZ\x90\0", "a Windows program"),
)


class FileType:
    """Type of a file that is not text.

    `medium` is "image" or "document" for files that a model may be able to view, and "data" for all others. `name`
    includes its article. A `width` or `height` of 0 is unknown.
    """

    __slots__ = ("height", "medium", "name", "width")

    def __init__(self, name: str, medium: str = "data", width: int = 0, height: int = 0) -> None:
        self.name = name
        self.medium = medium
        self.width = width
        self.height = height


def find_type(head: bytes) -> FileType | None:
    """Return the type of a file that begins with `head`, or None if the file may be text. A size of 0 is unknown."""
    for magic, name, measure in _IMAGES:
        if head.startswith(magic) and (name != "a WebP image" or head[8:12] == b"WEBP"):
            width, height = _measured(measure, head)
            return FileType(name, "image", width, height)
    if head.startswith(b"%PDF-"):
        return FileType("a PDF document", "document")
    for magic, name in _KINDS:
        if head.startswith(magic):
            return FileType(name)
    if head[4:8] == b"ftyp" and b"\0" in head[:4]:
        return FileType("an MP4 or HEIF file")
    return FileType("a tar archive") if head[257:262] == b"ustar" and b"\0" in head[:257] else None


def _measured(measure: Callable[[bytes], tuple[int, int]], head: bytes) -> tuple[int, int]:
    try:
        return measure(head)
    except (struct.error, IndexError):
        return 0, 0


def _measure_png(head: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", head, 16)
    return width, height


def _measure_gif(head: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _measure_webp(head: bytes) -> tuple[int, int]:
    chunk = head[12:16]
    if chunk == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _measure_jpeg(head: bytes) -> tuple[int, int]:
    """Return the size of a JPEG image: skip segments up to the frame segment, which contains the size."""
    at = 2
    while head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        at += 1 if marker == 0xFF else 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return 0, 0


_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _measure_png),
    (b"\xff\xd8\xff", "a JPEG image", _measure_jpeg),
    (b"GIF87a", "a GIF image", _measure_gif),
    (b"GIF89a", "a GIF image", _measure_gif),
    (b"RIFF", "a WebP image", _measure_webp),
)
