"""The part of a checkpoint that contains the changes of the root file system of a session. The archive then begins with
a tar member named `_NAME`, which contains the content id of the image and the names of replaced and removed files.
sandboxd adds this member, and removes it before it unpacks the rest. The rest is packed and unpacked as root inside the
sandbox. So a forged archive can do only what its session can do: it can create no device, use no id of another sandbox,
write no file outside, and use no more than the disk of the session.
"""

import re
import tarfile
from collections.abc import AsyncIterator, Sequence

from contract.errors import SandboxUnavailable
from store.archives.base import join_chunks, read_head
from workers.sandboxd.archives.packing import PackingGuest, run_with_input, unpack
from workers.sandboxd.disks.changes import MAX_LIST_BYTES, RootChanges

_NAME = ".toolcrew-root-changes"
_HEAD = re.compile(rb"(sha256:[0-9a-f]{64}) ([0-9]{1,9})\n")
_HEAD_BYTES = 100
# Standard input has two lists of names. The folders of the first list are packed without their content. For the second,
# `find` lists files, and folders with all of their content. A listed file may disappear meanwhile.
_PACK = """
{ head -c "$1"; xargs -0 -r bash -c 'find "$@" -xdev -print0' find; } |
tar -c -f - -b 128 --format=posix --sparse --one-file-system --numeric-owner --ignore-failed-read -C / \\
    --no-recursion --null --files-from=- --recursion -- "${@:2}"
exit "${PIPESTATUS[1]}"
"""
# Delete replaced folders first: tar replaces files, but a folder only if it is empty.
_CLEAR = """
xargs -0 -r bash -c '
    for path; do
        if [[ -d $path && ! -L $path ]]; then rm -rf --one-file-system -- "$path" || exit 1; fi
    done' clear
"""
_UNPACK = ("tar", "-x", "-f", "-", "-p", "--same-owner", "--numeric-owner", "--delay-directory-restore", "-C", "/")
_REMOVE = ("xargs", "-0", "-r", "rm", "-rf", "--one-file-system", "--")


def pack_changes(changes: RootChanges, roots: Sequence[str]) -> tuple[list[str], bytes]:
    """Return the program that packs the changes and all files below the folders, and its standard input."""
    argv = ["bash", "-c", _PACK, "pack", str(len(changes.folders)), *(root.removeprefix("/") for root in roots)]
    return argv, changes.folders + changes.replaced


async def unpack_changes(guest: PackingGuest, changes: RootChanges, read: AsyncIterator[bytes], total: int) -> None:
    """Unpack an archive with changes into a guest that has the same image. Raises the errors of `unpack`."""
    await run_with_input(guest, ["bash", "-c", _CLEAR], changes.replaced)
    await unpack(guest, _UNPACK, read, total)
    # Remove files last: the image's own tar, which unpacks, may need files that a newer version in the archive does not
    # need.
    await run_with_input(guest, _REMOVE, changes.removed)


def encode_changes(changes: RootChanges) -> bytes:
    """Return the tar member with the list of changes, which is the first member of the archive."""
    content = f"{changes.image} {len(changes.replaced)}\n".encode() + changes.replaced + changes.removed
    member = tarfile.TarInfo(_NAME)
    member.size = len(content)
    return member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


async def split_changes(
    chunks: AsyncIterator[bytes], total: int
) -> tuple[RootChanges | None, AsyncIterator[bytes], int]:
    """Split an archive of `total` bytes. Return the list of changes at its start (None if there is none), the rest, and
    the size of the rest. Raises SandboxUnavailable.
    """
    head = await read_head(chunks, tarfile.BLOCKSIZE)
    size = _parse_size(head[: tarfile.BLOCKSIZE])
    if size is None:
        return None, join_chunks(head, chunks), total
    end = tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE
    head += await read_head(chunks, end - len(head))
    content = head[tarfile.BLOCKSIZE : tarfile.BLOCKSIZE + size]
    match = _HEAD.match(content, 0, _HEAD_BYTES)
    if match is None or len(content) < size:
        raise SandboxUnavailable("the stored changes of the root file system are damaged: restore another checkpoint")
    start = match.end()
    middle = start + int(match[2])
    changes = RootChanges(match[1].decode(), b"", content[start:middle], content[middle:])
    return changes, join_chunks(head[end:], chunks), total - end


def _parse_size(block: bytes) -> int | None:
    """Return the size of the member with the list of changes, or None when the archive begins with another member."""
    try:
        member = tarfile.TarInfo.frombuf(block, "ascii", "replace")
    except tarfile.HeaderError:
        return None
    return member.size if member.name == _NAME and 0 <= member.size <= 2 * MAX_LIST_BYTES else None
