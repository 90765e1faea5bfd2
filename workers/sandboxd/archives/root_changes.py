"""The head of a checkpoint, and the changes of the root file system of a session. An archive begins with a tar member
named `_NAME`, which sandboxd adds to every checkpoint and removes before it unpacks the rest. So a program that writes
into the archive of its sandbox cannot write the head. The head has the content id of the image and the sizes of two
lists of names. The names of replaced files follow in the same member, the names of removed files after the end of the
tar archive, so that each list can be streamed when it is needed.

The rest is packed and unpacked as root inside the sandbox. So an archive can do only what its session can do: it can
create no device, use no id of another sandbox, write no file outside, and use no more than the disk of the session.
"""

import re
import shlex
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from toolcrew.archives.base import join_chunks
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.archives.packing import (
    ATTRIBUTES,
    ROOTS,
    PackingGuest,
    run_with_input,
    unpack,
    unpack_roots,
)
from toolcrew.workers.sandboxd.disks.changes import MAX_LIST_BYTES, RootChanges

_NAME = ".toolcrew-root-changes"
_LINE = re.compile(rb"(sha256:[0-9a-f]{64}|-) ([0-9]{1,9}) ([0-9]{1,9})\n")
_LINE_BYTES = 100
# Standard input has two lists of names. The folders of the first list are packed without their content. For the second,
# `find` lists files, and folders with all of their content. A listed file may disappear meanwhile.
_PACK = f"""
{{ head -c "$1"; xargs -0 -r bash -c 'find "$@" -xdev -print0' find; }} |
tar -c -f - -b 128 --format=posix --sparse --one-file-system --numeric-owner --ignore-failed-read \\
    {shlex.join(ATTRIBUTES)} -C / --no-recursion --null --files-from=- --recursion -- "${{@:2}}"
exit "${{PIPESTATUS[1]}}"
"""
# Delete replaced folders first: tar replaces files, but a folder only if it is empty.
_CLEAR = """
xargs -0 -r bash -c '
    for path; do
        if [[ -d $path && ! -L $path ]]; then rm -rf --one-file-system -- "$path" || exit 1; fi
    done' clear
"""
_UNPACK = (
    *("tar", "-x", "-f", "-", "-p", "--same-owner", "--numeric-owner", "--delay-directory-restore", *ATTRIBUTES),
    *("-C", "/"),
)
_REMOVE = ("xargs", "-0", "-r", "rm", "-rf", "--one-file-system", "--")


@dataclass(frozen=True)
class ArchiveHead:
    """The head of an archive. `image`: the content id of the image whose root file system was changed; None without
    changes. `replaced`, `removed`: sizes of the lists of names, in bytes.
    """

    image: str | None = None
    replaced: int = 0
    removed: int = 0

    def encode(self) -> bytes:
        """Return the first bytes of the archive, up to the list of replaced names."""
        line = f"{self.image or '-'} {self.replaced} {self.removed}\n".encode()
        member = tarfile.TarInfo(_NAME)
        member.size = len(line) + self.replaced
        return member.tobuf(tarfile.USTAR_FORMAT) + line

    @property
    def padding(self) -> int:
        """The number of bytes between the list of replaced names and the next tar member."""
        return -(len(self.encode()) + self.replaced) % tarfile.BLOCKSIZE

    def count_packed(self, total: int) -> int:
        """Return the size of the tar archive in an archive of `total` bytes."""
        return total - len(self.encode()) - self.replaced - self.padding - self.removed


class ArchiveReader:
    """Reads an archive in order. All methods raise the errors of `chunks`."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    async def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        return b"".join([piece async for piece in self.take(size)])

    async def take(self, size: int) -> AsyncIterator[bytes]:
        """Yield the next `size` bytes, or fewer at the end."""
        while size and (piece := self._rest or await anext(self._chunks, b"")):
            taken, self._rest = piece[:size], piece[size:]
            size -= len(taken)
            yield taken

    def take_rest(self) -> AsyncIterator[bytes]:
        """Yield all remaining bytes. The store checks the archive at its end."""
        rest, self._rest = self._rest, b""
        return join_chunks(rest, self._chunks) if rest else self._chunks

    async def skip(self, size: int) -> None:
        async for _ in self.take(size):
            pass


async def read_archive_head(reader: ArchiveReader) -> ArchiveHead:
    """Return the head of an archive. Raises SandboxUnavailable."""
    block = await reader.read(tarfile.BLOCKSIZE)
    size = _parse_size(block)
    line = b"" if size is None else await _read_line(reader)
    match = _LINE.fullmatch(line)
    if match is None:
        raise _build_damaged()
    image = None if match[1] == b"-" else match[1].decode()
    head = ArchiveHead(image, int(match[2]), int(match[3]))
    is_whole = size == len(line) + head.replaced and max(head.replaced, head.removed) <= MAX_LIST_BYTES
    if not is_whole or (image is None and head.replaced + head.removed):
        raise _build_damaged()
    return head


async def _read_line(reader: ArchiveReader) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES and (byte := await reader.read(1)):
        line += byte
    return line


async def pack_with_head(changes: RootChanges | None, packed: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a whole archive: the head, the tar archive `packed`, and the names of removed files."""
    if changes is None:
        head = ArchiveHead()
        yield head.encode() + bytes(head.padding)
    else:
        head = ArchiveHead(changes.image, changes.replaced, changes.removed)
        yield head.encode()
        async for names in changes.read_replaced():
            yield names
        yield bytes(head.padding)
    async for chunk in packed:
        yield chunk
    if changes is not None:
        async for names in changes.read_removed():
            yield names


def pack_changes(changes: RootChanges, roots: Sequence[str]) -> list[str]:
    """Return the program that packs the changes and all files below the folders. Its standard input is
    `RootChanges.read_packed`.
    """
    return ["bash", "-c", _PACK, "pack", str(changes.folders), *(root.removeprefix("/") for root in roots)]


async def unpack_archive(guest: PackingGuest, chunks: AsyncIterator[bytes], total: int, root_image: str | None) -> bool:
    """Unpack an archive of `total` bytes with a head. If its changes are left out, unpack ROOTS only.
    `root_image`: as in `Checkpoints.load`. Return False if changes were left out. Raises SandboxUnavailable and the
    errors of `unpack`.
    """
    reader = ArchiveReader(chunks)
    head = await read_archive_head(reader)
    packed = head.count_packed(total)
    if packed < 0:
        raise _build_damaged()
    if head.image is None:
        await reader.skip(head.padding)
        await unpack(guest, unpack_roots(), reader.take_rest(), packed)
        return True
    is_restored = head.image == root_image
    if is_restored:
        await run_with_input(guest, ["bash", "-c", _CLEAR], reader.take(head.replaced), head.replaced)
    else:
        await reader.skip(head.replaced)
    await reader.skip(head.padding)
    await unpack(guest, _UNPACK if is_restored else unpack_roots(ROOTS), reader.take(packed), packed)
    if is_restored:
        await run_with_input(guest, _REMOVE, reader.take(head.removed), head.removed)
    else:
        await reader.skip(head.removed)
    async for _ in reader.take_rest():
        raise _build_damaged()
    return is_restored


def _parse_size(block: bytes) -> int | None:
    """Return the size of the head's member, or None when the archive begins with another member."""
    try:
        member = tarfile.TarInfo.frombuf(block, "ascii", "replace")
    except tarfile.HeaderError:
        return None
    return member.size if member.name == _NAME else None


def _build_damaged() -> SandboxUnavailable:
    return SandboxUnavailable("the head of the stored files is damaged: restore another checkpoint")
