"""A folder of the user's as a tar archive, and an archive from a sandbox back into a folder. The second is hostile."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from contract.calls import MAX_BLOB_BYTES
from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.tar_archives import BLOCK, TarEntry, read_tar

_PIECE_BYTES = 1024 * 1024


def pack_folder(folder: Path) -> bytes:
    """The folder's content as an uncompressed tar. Raises ConfigError when it is no folder, cannot be read, or is
    larger than a blob.
    """
    buffer = io.BytesIO()
    write_folder(buffer, folder, MAX_BLOB_BYTES)
    return buffer.getvalue()


def write_folder(file: IO[bytes], folder: Path, max_bytes: int) -> None:
    """Write the folder's content to a file as an uncompressed tar. Raises ConfigError as `pack_folder`."""
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
    """Unpack an archive in memory as `unpack_stream` does."""
    return unpack_stream(io.BytesIO(data), len(data), folder)


def unpack_stream(stream: IO[bytes], size: int, folder: Path) -> list[str]:
    """Unpack `size` bytes of a file that can seek into `folder`, which is made. Return the names that were left out.
    Raises ToolFailure when the archive is broken.

    Nothing is ever written through a link of the archive: files and folders come first, links last, and only those
    whose target cannot lead out. An entry whose own name leads out is refused: PATH_NOT_ALLOWED.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = folder.resolve()
    skipped: list[str] = []
    links: list[tuple[PurePosixPath, str]] = []
    try:
        # Every header has a block of its own, so there cannot be more of them.
        for entry in read_tar(stream, size // BLOCK):
            name = _inner_name(entry.name)
            if entry.kind == "symlink":
                links.append((name, entry.link))
            elif not _unpack_entry(stream, entry, root, name):
                skipped.append(str(name))
        return skipped + list(_make_links(root, links))
    except (OSError, ValueError) as error:
        raise ToolFailure(ErrorCode.INTERNAL, f"the archive from the sandbox cannot be unpacked: {error}") from error


def _plain_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files, folders and links as they are; sockets, pipes and devices are left out. The owner is the sandbox's
    user.
    """
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    entry.uid = entry.gid = 1000
    entry.uname = entry.gname = ""
    return entry


def _inner_name(text: str) -> PurePosixPath:
    name = PurePosixPath(text)
    if name.is_absolute() or ".." in name.parts or "\0" in text:
        raise ToolFailure(
            ErrorCode.PATH_NOT_ALLOWED, f"the sandbox's archive holds a name that leads out: {text[:200]!r}"
        )
    return name


def _unpack_entry(stream: IO[bytes], entry: TarEntry, root: Path, name: PurePosixPath) -> bool:
    """Make one folder, file or hard link; no more is written than the archive holds. False for anything special."""
    target = root.joinpath(*name.parts)
    if entry.kind == "folder":
        _checked_parent(root, target).joinpath(target.name).mkdir(exist_ok=True) if target != root else None
        return True
    if entry.kind == "hardlink":
        return _link_file(root, target, root.joinpath(*_inner_name(entry.link).parts))
    if entry.kind != "file":
        return False
    parent = _checked_parent(root, target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(parent / target.name, "wb", opener=lambda path, _: os.open(path, flags, 0o644)) as file:
        stream.seek(entry.offset)
        for start in range(0, entry.size, _PIECE_BYTES):
            file.write(stream.read(min(_PIECE_BYTES, entry.size - start)))
        os.fchmod(file.fileno(), 0o755 if entry.is_executable else 0o644)
    return True


def _link_file(root: Path, target: Path, first: Path) -> bool:
    """Another name for a file of the folder. False when there is no such file."""
    if not first.parent.is_dir():
        return False
    source, parent = _checked_parent(root, first) / first.name, _checked_parent(root, target)
    if source.is_symlink() or not source.is_file():
        return False
    (parent / target.name).unlink(missing_ok=True)
    os.link(source, parent / target.name, follow_symlinks=False)
    return True


def _checked_parent(root: Path, target: Path) -> Path:
    """The real folder that `target` goes into: inside, also where links of the user's own lie on the way."""
    target.parent.mkdir(parents=True, exist_ok=True)
    parent = target.parent.resolve()
    if not parent.is_relative_to(root):
        raise ToolFailure(ErrorCode.PATH_NOT_ALLOWED, f"{target} would be written outside of {root}")
    return parent


def _make_links(root: Path, links: list[tuple[PurePosixPath, str]]) -> Iterator[str]:
    """Make the links that stay inside; gives the names of the others."""
    for name, target in links:
        place = root.joinpath(*name.parts)
        # The real folder: a link made before may lie on the way, and then the name's own depth says nothing.
        parent = _checked_parent(root, place)
        if not _stays_inside(len(parent.relative_to(root).parts), target) or os.path.lexists(place):
            yield str(name)
            continue
        (parent / place.name).symlink_to(target)


def _stays_inside(depth: int, target: str) -> bool:
    """Only leading `..`, no more than the link's folder lies deep: then it stays inside, whatever else on the way is
    such a link.
    """
    parts = PurePosixPath(target).parts
    ups = len([part for part in parts if part == ".."])
    leads_up_first = all(part == ".." for part in parts[:ups])
    return not target.startswith("/") and "\0" not in target and leads_up_first and ups <= depth
