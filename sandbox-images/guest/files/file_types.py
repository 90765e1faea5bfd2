"""Recognize files that are not text by their first bytes."""

from __future__ import annotations

HEAD_BYTES = 65_536
"""Number of bytes at the start of a file that are examined for its type and its encoding."""

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
_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"RIFF", "a WebP image"),
)


class FileType:
    """Type of a file that is not text.

    `medium` is "image" or "document" for files that a model may be able to view, and "data" for all others. `name`
    includes the article: "a PDF document".
    """

    __slots__ = ("medium", "name")

    def __init__(self, name: str, medium: str = "data") -> None:
        self.name = name
        self.medium = medium


def find_type(head: bytes) -> FileType | None:
    """Return the type of a file that begins with `head`, or None if the file may be text."""
    for magic, name in _IMAGES:
        if head.startswith(magic) and (name != "a WebP image" or head[8:12] == b"WEBP"):
            return FileType(name, "image")
    if head.startswith(b"%PDF-"):
        return FileType("a PDF document", "document")
    for magic, name in _KINDS:
        if head.startswith(magic):
            return FileType(name)
    if head[4:8] == b"ftyp" and b"\0" in head[:4]:
        return FileType("an MP4 or HEIF file")
    return FileType("a tar archive") if head[257:262] == b"ustar" and b"\0" in head[:257] else None
