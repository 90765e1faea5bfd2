"""Skills as archives: .zip files from users, which may be hostile, and the stored bundles of installed skills."""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from toolcrew.contract.skills import (
    MAX_ARCHIVE_BYTES,
    MAX_BUNDLE_BYTES,
    MAX_BUNDLE_FILES,
    OMITTED_FOLDERS,
    SKILL_FILE,
    BundleFile,
    SkillBroken,
)
from toolcrew.contract.tar_archives import TarEntry, TarRefused, read_tar
from toolcrew.workers.skills.loader import MAX_DEPTH, Skill, load_files, pack_skill
from toolcrew.workers.skills.sources import MemorySource

MAX_ZIP_BYTES = MAX_BUNDLE_BYTES
_MAX_PATH_CHARS = 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time of a .zip entry. Archives of the same files are then identical."""
_REGULAR = 0o100000


@dataclass(frozen=True)
class Member:
    """A file of an archive."""

    path: str
    data: bytes
    is_executable: bool


def load_zip(path: Path, owner: str = "") -> Skill:
    """Return the skill in a .zip file, which contains the skill's folder or the folder's content.

    Raises SkillBroken for anything that is not a plain file, and OSError.
    """
    if path.stat().st_size > MAX_ZIP_BYTES:
        raise SkillBroken(
            f"it is larger than {MAX_ZIP_BYTES // 1024 // 1024} MiB: remove files that the skill does not use"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            members = _read_zip(archive)
    except SkillBroken:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        IndexError,
    ) as error:
        # These errors mean that the archive is damaged, encrypted, or uses an unsupported compression method.
        raise SkillBroken(
            f"it is not a readable .zip file ({error}): create it with `zip -r`, or pass the folder"
        ) from error
    folder, plain = _without_top(members)
    return load_members(str(path), folder or path.stem, plain, owner)


def load_tar(data: bytes, folder: str, owner: str = "") -> Skill:
    """Return the skill in a tar archive of its folder, as a session's sandbox makes it. Raises SkillBroken."""
    members = [
        Member(path, data[file.offset : file.offset + file.size], file.is_executable)
        for path, file in find_files(data).items()
    ]
    return load_members(folder, folder, members, owner)


def find_files(data: bytes) -> dict[str, TarEntry]:
    """Return the plain files of a folder in a tar archive, by path. Links, devices and folders are omitted.

    Raises SkillBroken.
    """
    by_path = {}
    try:
        for entry in read_tar(io.BytesIO(data), 2 * MAX_BUNDLE_FILES):
            path = entry.name.removeprefix("./")
            if entry.kind == "file" and not any(part in ("", ".", "..") for part in path.split("/")):
                by_path[path] = entry
    except TarRefused as error:
        raise SkillBroken(f"its files could not be read ({error}): pack the skill again") from error
    return by_path


def load_members(name: str, folder: str, members: Iterable[Member], owner: str = "") -> Skill:
    """Return the skill that consists of these files. `name` describes their source in the log. Raises SkillBroken."""
    unique = list({member.path: member for member in members}.values())
    if not any(member.path == SKILL_FILE for member in unique):
        raise SkillBroken(f"it has no {SKILL_FILE} at its top: pack the skill's folder, or the content of the folder")
    source = MemorySource(name, {member.path: member.data for member in unique})
    return load_files(
        source,
        folder,
        [BundleFile(file.path, len(file.data), file.is_executable, file.data[:2]) for file in unique],
        owner,
    )


def write_zip(skill: Skill, target: IO[bytes]) -> None:
    """Write the skill's folder as a .zip file. The same files give the same bytes.

    Raises ToolFailure(STALE_FILE): the files have changed since they were loaded.
    """
    with pack_skill(skill, MAX_ARCHIVE_BYTES) as packed, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in read_bundle(packed):
            entry = zipfile.ZipInfo(f"{skill.name}/{member.path}", _EPOCH)
            entry.create_system = 3  # 3 is Unix: readers then use the permission bits.
            entry.external_attr = (_REGULAR | (0o755 if member.is_executable else 0o644)) << 16
            archive.writestr(entry, member.data, zipfile.ZIP_DEFLATED, 9)


def compress_bundle(skill: Skill) -> bytes:
    """Return the compressed bundle of a skill, as it is stored. Raises ToolFailure(STALE_FILE)."""
    with pack_skill(skill, MAX_ARCHIVE_BYTES) as packed:
        return zlib.compress(packed.read(), 6)


def expand_bundle(data: bytes) -> list[Member]:
    """Return the files of a bundle from `compress_bundle`.

    Raises SkillBroken for any other data, without expanding it beyond the limit.
    """
    inflater = zlib.decompressobj()
    try:
        packed = inflater.decompress(data, MAX_ARCHIVE_BYTES)
        if not inflater.eof:
            raise SkillBroken("the stored bundle is truncated or too large: install the skill again")
        return read_bundle(io.BytesIO(packed))
    except (zlib.error, ValueError) as error:
        if isinstance(error, SkillBroken):
            raise
        raise SkillBroken("the stored data is not a bundle: install the skill again") from error


def read_bundle(packed: IO[bytes]) -> list[Member]:
    """Return the files of a tar archive from `pack_skill`. Raises TarRefused."""
    entries = list(read_tar(packed, 2 * MAX_BUNDLE_FILES))
    return [Member(entry.name, entry.read(packed), entry.is_executable) for entry in entries]


def _read_zip(archive: zipfile.ZipFile) -> list[Member]:
    """Return the files of the archive. Raises SkillBroken, and the errors of zipfile."""
    entries = [entry for entry in archive.infolist() if not _is_folder(entry)]
    if len(entries) > MAX_BUNDLE_FILES:
        raise SkillBroken(f"it has more than {MAX_BUNDLE_FILES} files: remove files that the skill does not use")
    by_path: dict[str, Member] = {}
    remaining_bytes = MAX_BUNDLE_BYTES
    for entry in entries:
        _check_entry(entry)
        if _is_ignored(entry.filename):
            continue
        if entry.filename in by_path:
            raise SkillBroken(f"{entry.filename[:200]} occurs twice in it: pack the skill again")
        # Count the decompressed bytes, because the size that the archive states may be false.
        with archive.open(entry) as content:
            data = content.read(remaining_bytes + 1)
        remaining_bytes -= len(data)
        if remaining_bytes < 0:
            raise SkillBroken(
                f"its files are larger than {MAX_BUNDLE_BYTES // 1024 // 1024} MiB: remove files that the skill "
                "does not use"
            )
        by_path[entry.filename] = Member(entry.filename, data, bool((entry.external_attr >> 16) & 0o100))
    _check_folders(by_path)
    return list(by_path.values())


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name, file_type = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
    # Refuse links, absolute paths and `..`: another program may later unpack the archive onto a disk.
    if file_type not in (0, stat.S_IFREG):
        raise SkillBroken(f"{name[:200]} is not a regular file but a link or a device: add the file itself")
    if entry.flag_bits & 0x1:
        raise SkillBroken(f"{name[:200]} is encrypted: pack it without a password")
    parts = name.split("/")
    is_plain = (
        name.isprintable()
        and "\\" not in name
        and len(name) <= _MAX_PATH_CHARS
        and all(part not in ("", ".", "..") for part in parts)
    )
    if not is_plain:
        raise SkillBroken(
            f"{name[:200]!r} is not a path within a folder: use names without .., without \\ and without a leading /"
        )
    if len(parts) > MAX_DEPTH:
        raise SkillBroken(f"its folders are nested more than {MAX_DEPTH} deep: put {name[:200]} higher")


def _is_folder(entry: zipfile.ZipInfo) -> bool:
    """Return whether the entry is a folder. Such entries can be ignored, because the paths of files name their
    folders.
    """
    return entry.filename.endswith("/") and entry.file_size == 0


def _is_ignored(path: str) -> bool:
    return any(part in OMITTED_FOLDERS for part in path.split("/")[:-1]) or path.startswith("__MACOSX/")


def _check_folders(by_path: Mapping[str, Member]) -> None:
    """Raise SkillBroken when a file and a folder have the same name."""
    for path in by_path:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in by_path:
                raise SkillBroken(f"{path[:200]} is below a file: pack the skill again")


def _without_top(members: list[Member]) -> tuple[str, list[Member]]:
    """If all files are in one top folder, return its name and the files with paths below it. Otherwise return "" and
    the files.
    """
    tops = {member.path.partition("/")[0] for member in members}
    if len(tops) != 1 or any("/" not in member.path for member in members):
        return "", members
    (top,) = tops
    return top, [Member(member.path.removeprefix(f"{top}/"), member.data, member.is_executable) for member in members]
