"""Reads tar archives that a sandbox or a tenant made, in time and memory proportional to their size.

The archives are untrusted, and the standard library's tarfile is not safe for them. A PAX global header makes tarfile
copy all fields for each entry. Chained extended headers exhaust its stack. A sparse entry of some bytes becomes
gigabytes. One of its patterns is quadratic in Python before 3.11.10.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal

BLOCK = 512
MAX_EXTENDED_BYTES = 64 * 1024
"""Limit of one extended header: a name has at most 4096 bytes, and a link has two names."""
MAX_NAME_BYTES = 4096

Kind = Literal["file", "folder", "symlink", "hardlink", "special"]
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "folder",
}
_SPECIAL = frozenset((b"3", b"4", b"6"))
"""Devices and pipes."""
_EXTENDED = {b"x": "pax", b"L": "path", b"K": "linkpath"}


class TarRefused(ValueError):
    """Raised when the archive is damaged or uses an unsupported feature. The message has the reason."""


@dataclass(frozen=True)
class TarEntry:
    """Entry of an archive. `offset`: position of the content in the stream. `size`: bytes of the content, 0 unless
    the entry is a file. `link`: target of a link.
    """

    name: str
    kind: Kind
    is_executable: bool
    offset: int
    size: int
    link: str = ""

    def read(self, stream: IO[bytes]) -> bytes:
        """Return the content of the entry."""
        stream.seek(self.offset)
        return stream.read(self.size)


def read_tar(stream: IO[bytes], max_entries: int) -> Iterator[TarEntry]:
    """Yield the entries of the archive in a seekable stream. Supports ustar, GNU long names, and path, linkpath and
    size of PAX headers.

    Raises TarRefused: sparse entries, global headers, chained extended headers, sizes beyond the archive, more than
    `max_entries` headers.
    """
    end = stream.seek(0, 2)
    at, fields = 0, dict[str, str]()
    for _ in range(max_entries + 1):
        stream.seek(at)
        header = stream.read(BLOCK)
        if len(header) < BLOCK:
            raise TarRefused("it is cut off")
        if not header.strip(b"\0"):
            return
        _check_header(header)
        flag, size = header[156:157], _number(header[124:136])
        at += BLOCK
        if flag in _EXTENDED:
            if size > min(MAX_EXTENDED_BYTES, end - at):
                raise TarRefused("an extended header is too large")
            extended_fields = _read_extended(_EXTENDED[flag], stream.read(size))
            if fields.keys() & extended_fields.keys():
                raise TarRefused("extended headers are chained")
            fields |= extended_fields
            at += _blocks(size)
            continue
        entry = _build_entry(header, flag, at, size, fields)
        if entry.offset + entry.size > end:
            raise TarRefused(f"{entry.name[:200]!r} is larger than the archive")
        yield entry
        at, fields = at + _blocks(entry.size), {}
    raise TarRefused(f"it has more than {max_entries} entries")


def _build_entry(header: bytes, flag: bytes, at: int, size: int, fields: dict[str, str]) -> TarEntry:
    if flag not in _KINDS and flag not in _SPECIAL:
        raise TarRefused(f"entries of type {flag!r} are not supported: sparse files and global headers")
    name = fields.get("path") or _name_of(header)
    kind = _KINDS.get(flag, "special")
    if kind == "file" and name.endswith("/"):
        kind = "folder"
    if "size" in fields:
        size = _decimal(fields["size"])
    link = fields.get("linkpath") or _text(header[157:257])
    if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES or "\0" in name or "\0" in link:
        raise TarRefused("an entry has a name that is not a valid file name")
    return TarEntry(
        name.rstrip("/") or name, kind, bool(_number(header[100:108]) & 0o100), at, size if kind == "file" else 0, link
    )


def _check_header(header: bytes) -> None:
    # The checksum counts its own field as spaces.
    if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise TarRefused("a header is damaged")


def _read_extended(kind: str, data: bytes) -> dict[str, str]:
    if kind != "pax":
        return {kind: _text(data)}
    fields: dict[str, str] = {"pax": ""}
    at = 0
    while at < len(data):
        length, separator, _ = data[at : at + 8].partition(b" ")
        end = at + (int(length) if separator and length.isdigit() else 0)
        key, equals, value = data[at + len(length) + 1 : max(at, end - 1)].partition(b"=")
        if not equals or data[end - 1 : end] != b"\n" or key.startswith(b"GNU.sparse"):
            raise TarRefused("an extended header is damaged or describes a sparse file")
        if key in (b"path", b"linkpath", b"size"):
            fields[key.decode()] = value.decode("utf-8", "surrogateescape")
        at = end
    return fields


def _name_of(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Return the value of a number field: octal digits, or a binary number after the byte 0x80."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if digits.strip(b"01234567"):
        raise TarRefused("a header has a field that is not a number")
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise TarRefused("an extended header has a size that is not a number")
    return int(text)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
