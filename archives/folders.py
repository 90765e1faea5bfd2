"""Pack a folder into a tar archive, and unpack an archive from a sandbox into a folder. An archive from a sandbox is
hostile input.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.tar_archives import BLOCK, TarEntry, read_tar

_PIECE_BYTES = 1024 * 1024


def pack_folder(folder: Path) -> bytes:
    """Return the folder's content as an uncompressed tar. Raises ConfigError when the path is not a folder, cannot be
    read, or its content is larger than a blob may be.
    """
    buffer = io.BytesIO()
    write_folder(buffer, folder, MAX_BLOB_BYTES)
    return buffer.getvalue()


def write_folder(file: IO[bytes], folder: Path, max_bytes: int) -> None:
    """Write the folder's content to a file as an uncompressed tar. Raises ConfigError like `pack_folder`."""
    if not folder.is_dir():
        raise ConfigError(f"the workspace {folder} is not a folder: give an existing one")
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(folder.rglob("*")):
                size = path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
                if file.tell() + size > max_bytes:
                    raise ConfigError(f"the workspace {folder} is larger than {max_bytes} bytes: give a smaller folder")
                archive.add(path, arcname=str(path.relative_to(folder)), recursive=False, filter=_plain_entry)
    except OSError as error:
        raise ConfigError(
            f"the workspace {folder} cannot be read ({error}): fix its permissions or give another folder"
        ) from error


def unpack_archive(data: bytes, folder: Path) -> list[str]:
    """Unpack an archive in memory like `unpack_stream`."""
    return unpack_stream(io.BytesIO(data), len(data), folder)


def unpack_stream(stream: IO[bytes], size: int, folder: Path) -> list[str]:
    """Unpack `size` bytes of a seekable file into `folder`, which is created. Return the names of entries that were
    skipped. Raises ToolFailure when the archive is broken.

    Nothing is written through a link of the archive: files and folders are created first, links last. A link is
    created only if its target cannot leave the folder. An entry whose own name leaves the folder raises
    ToolFailure(PATH_NOT_ALLOWED).
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = folder.resolve()
    skipped: list[str] = []
    links: list[tuple[PurePosixPath, str]] = []
    try:
        # Every entry has a header of one block, so this is the highest possible number of entries.
        for entry in read_tar(stream, size // BLOCK):
            name = _inner_name(entry.name)
            if entry.kind == "symlink":
                links.append((name, entry.link))
            elif not _unpack_entry(stream, entry, root, name):
                skipped.append(str(name))
        return skipped + list(_make_links(root, links))
    except (OSError, ValueError) as error:
        raise ToolFailure(
            ErrorCode.INTERNAL, f"the archive from the sandbox cannot be unpacked ({error}): try again"
        ) from error


def _plain_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a file, folder or link as it is, with the sandbox's user as owner; None for sockets, pipes and devices."""
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    entry.uid = entry.gid = 1000
    entry.uname = entry.gname = ""
    return entry


def _inner_name(text: str) -> PurePosixPath:
    name = PurePosixPath(text)
    if name.is_absolute() or ".." in name.parts or "\0" in text:
        raise ToolFailure(
            ErrorCode.PATH_NOT_ALLOWED,
            f"the archive from the sandbox was refused, because a name leads out of the folder: {text[:200]!r}",
        )
    return name


def _unpack_entry(stream: IO[bytes], entry: TarEntry, root: Path, name: PurePosixPath) -> bool:
    """Create one folder, file or hard link, with at most the bytes of the entry. Return False for special files."""
    target = root.joinpath(*name.parts)
    if entry.kind == "folder":
        _resolve_parent(root, target).joinpath(target.name).mkdir(exist_ok=True) if target != root else None
        return True
    if entry.kind == "hardlink":
        return _link_file(root, target, root.joinpath(*_inner_name(entry.link).parts))
    if entry.kind != "file":
        return False
    parent = _resolve_parent(root, target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(parent / target.name, "wb", opener=lambda path, _: os.open(path, flags, 0o644)) as file:
        stream.seek(entry.offset)
        for start in range(0, entry.size, _PIECE_BYTES):
            file.write(stream.read(min(_PIECE_BYTES, entry.size - start)))
        os.fchmod(file.fileno(), 0o755 if entry.is_executable else 0o644)
    return True


def _link_file(root: Path, target: Path, first: Path) -> bool:
    """Create a hard link to a file of the folder. Return False if the file does not exist."""
    if not first.parent.is_dir():
        return False
    source, parent = _resolve_parent(root, first) / first.name, _resolve_parent(root, target)
    if source.is_symlink() or not source.is_file():
        return False
    (parent / target.name).unlink(missing_ok=True)
    os.link(source, parent / target.name, follow_symlinks=False)
    return True


def _resolve_parent(root: Path, target: Path) -> Path:
    """Return the real parent folder of `target`. It must be inside `root`, also when the path contains links of the
    user.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    parent = target.parent.resolve()
    if not parent.is_relative_to(root):
        raise ToolFailure(
            ErrorCode.PATH_NOT_ALLOWED,
            f"{target} was not written, because it is outside of {root}: remove links that lead out of the folder",
        )
    return parent


def _make_links(root: Path, links: list[tuple[PurePosixPath, str]]) -> Iterator[str]:
    """Create the links that stay inside the folder, and yield the names of the others."""
    for name, target in links:
        link_path = root.joinpath(*name.parts)
        # An earlier link may be part of the path. Then only the real folder shows the depth.
        parent = _resolve_parent(root, link_path)
        if not _stays_inside(len(parent.relative_to(root).parts), target) or os.path.lexists(link_path):
            yield str(name)
            continue
        (parent / link_path.name).symlink_to(target)


def _stays_inside(depth: int, target: str) -> bool:
    """Return whether the target of a link, `depth` folders below the root, is inside the root. `..` may be only at the
    beginning of the target, at most `depth` times. Then other links on the path cannot lead outside.
    """
    parts = PurePosixPath(target).parts
    ups = len([part for part in parts if part == ".."])
    leads_up_first = all(part == ".." for part in parts[:ups])
    return not target.startswith("/") and "\0" not in target and leads_up_first and ups <= depth
