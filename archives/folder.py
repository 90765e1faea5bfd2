"""Archives as files in a folder of this host, or in a folder that several hosts mount.

Invariant: an archive without its facts (a file with size and hash) does not exist for readers. The facts are written
last, and deleted first.
"""

import contextlib
import functools
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from toolcrew.archives.base import (
    CHECK_EVERY_BYTES,
    MAX_FACTS_BYTES,
    STORE_SETTING,
    ArchiveHash,
    NotStored,
    StoredFacts,
    StoreThreads,
    check_room,
    encode_facts,
    is_name,
    parse_facts,
    split_name,
    write_all,
)
from toolcrew.contract.errors import SandboxUnavailable

_READ_BYTES = 1024 * 1024
_FORGOTTEN_S = 86_400.0
_DATA, _FACTS, _PART = ".tar", ".json", ".part"

T = TypeVar("T")


class FolderStore:
    """A store in a folder. An archive is `<tenant>/<id>.tar` and `<tenant>/<id>.json`; the `.json` is written last.
    Folders have mode 0700 and files 0600. If the store's folder is writable by its group, the archives are too, because
    several processes then share the store. `put` returns after everything is on the disk.

    `free_bytes`: no archive is stored if less space would remain on the disk. `setting`: the operator's setting that
    names the folder.
    """

    def __init__(self, folder: Path, free_bytes: int = 0, setting: str = STORE_SETTING) -> None:
        self._folder = folder
        self._free_bytes = free_bytes
        self._setting = setting
        self._threads = StoreThreads()

    async def put(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        tenant, archive = split_name(name)
        failed = f"the files of a session cannot be written to the folder {self._folder}"
        folder, group = await self._do(failed, lambda: self._make_folder(tenant))
        part = folder / f".{archive}.{secrets.token_hex(8)}{_PART}"
        try:
            with await self._do(failed, lambda: _create(part, group)) as file:
                facts = await self._write(file, chunks, failed)
            await self._do(failed, lambda: _publish(part, folder / (archive + _DATA), facts, group))
        finally:
            await self._do(failed, lambda: part.unlink(missing_ok=True))
        return facts

    async def describe(self, name: str) -> StoredFacts:
        tenant, archive = split_name(name)
        path = self._folder / tenant / (archive + _FACTS)
        return parse_facts(
            name, await self._do(f"the stored files {name} cannot be read", lambda: _read_facts(path, name))
        )

    async def get(self, name: str) -> AsyncGenerator[bytes]:
        expected, tally, failed = await self.describe(name), ArchiveHash(), f"the stored files {name} cannot be read"
        tenant, archive = split_name(name)
        with await self._do(failed, lambda: open(self._folder / tenant / (archive + _DATA), "rb", 0)) as file:
            while chunk := await self._do(failed, lambda: file.read(_READ_BYTES)):
                tally.add(chunk)
                yield chunk
        tally.check(name, expected)

    async def delete(self, name: str) -> bool:
        tenant, archive = split_name(name)
        return await self._do(
            f"the stored files {name} cannot be deleted", lambda: _delete(self._folder / tenant, archive)
        )

    async def list(self, prefix: str = "") -> list[str]:
        return await self._do(f"the folder {self._folder} cannot be listed", lambda: list(self._find(prefix)))

    def sweep(self, older_than_s: float = _FORGOTTEN_S) -> None:
        """Delete unfinished archives that are older than `older_than_s` seconds. Use 0 only if no other process writes
        to the folder.
        """
        without_facts = (path for path in self._folder.glob(f"*/*{_DATA}") if not path.with_suffix(_FACTS).exists())
        for path in [*self._folder.glob(f"*/.*{_PART}"), *without_facts]:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime >= older_than_s:
                    path.unlink()

    async def object_size(self, path: str) -> int:
        return (await self._do(f"{path} cannot be read", lambda: self._find_object(path).stat())).st_size

    async def read_object(self, path: str) -> AsyncGenerator[bytes]:
        failed = f"{path} cannot be read"
        with await self._do(failed, lambda: open(self._find_object(path), "rb", 0)) as file:
            while chunk := await self._do(failed, lambda: file.read(_READ_BYTES)):
                yield chunk

    def _find_object(self, path: str) -> Path:
        try:
            real = (self._folder / path).resolve(strict=True)
        except (FileNotFoundError, NotADirectoryError):
            raise NotStored(path) from None
        # The path is resolved first: a link must not lead out of the tenant's folder.
        if not real.is_relative_to((self._folder / path.partition("/")[0]).resolve()) or not real.is_file():
            raise NotStored(path)
        return real

    def _make_folder(self, tenant: str) -> tuple[Path, int]:
        """Return the folder of a tenant, and the mode bits for its group."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode, folder = self._folder.stat().st_mode, self._folder / tenant
        group = mode & 0o2070 if mode & 0o020 else 0
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            folder.chmod(0o700 | group)
        return folder, group

    def _find(self, prefix: str) -> Sequence[str]:
        tenant, is_whole, _ = prefix.partition("/")
        paths = (self._folder / tenant).glob(f"*{_FACTS}") if is_whole else self._folder.glob(f"*/*{_FACTS}")
        names = (f"{path.parent.name}/{path.stem}" for path in paths)
        return sorted(name for name in names if is_name(name) and name.startswith(prefix))

    async def _write(self, file: BinaryIO, chunks: AsyncIterator[bytes], failed: str) -> StoredFacts:
        tally, unchecked = ArchiveHash(), CHECK_EVERY_BYTES
        async for chunk in chunks:
            tally.add(chunk)
            unchecked += len(chunk)
            if unchecked >= CHECK_EVERY_BYTES:
                unchecked = 0
                await self._do(failed, lambda: check_room(self._folder, self._free_bytes, self._setting))
            await self._do(failed, functools.partial(write_all, file, chunk))
        await self._do(failed, lambda: os.fsync(file.fileno()))
        return tally.facts()

    async def _do(self, failure: str, work: Callable[[], T]) -> T:
        """Run blocking work in a thread, because disks and folders of other hosts may be slow. Raises
        SandboxUnavailable with the clause `failure`: the work failed.
        """
        try:
            return await self._threads.run(work)
        except OSError as error:
            raise SandboxUnavailable(
                f"{failure} ({error}): check its permissions and its disk, or set {self._setting} to another folder"
            ) from error


def _create(path: Path, group: int) -> BinaryIO:
    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, 0o600)
        if group:
            os.fchmod(descriptor, 0o600 | group & 0o060)
        return descriptor

    return open(path, "xb", 0, opener=opener)


def _read_facts(path: Path, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FACTS_BYTES)
    except FileNotFoundError:
        raise NotStored(name) from None


def _publish(part: Path, data: Path, facts: StoredFacts, group: int) -> None:
    """Make a new archive visible. Facts of an older archive are deleted first, because they would be wrong for the new
    archive.
    """
    facts_path = data.with_suffix(_FACTS)
    facts_path.unlink(missing_ok=True)
    part.rename(data)
    partial = facts_path.with_name(f".{facts_path.stem}.{secrets.token_hex(8)}{_PART}")
    try:
        with _create(partial, group) as file:
            write_all(file, encode_facts(facts))
            os.fsync(file.fileno())
        partial.rename(facts_path)
    finally:
        partial.unlink(missing_ok=True)
    # Without fsync of the folder, the renamed files may be lost at a power failure.
    folder = os.open(data.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _delete(folder: Path, archive: str) -> bool:
    was_there = True
    try:
        # The facts are deleted first, so that a reader never finds facts without data.
        (folder / (archive + _FACTS)).unlink()
    except FileNotFoundError:
        was_there = False
    (folder / (archive + _DATA)).unlink(missing_ok=True)
    return was_there
