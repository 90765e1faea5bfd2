"""Parcels as files of a folder: of this host, or one that several hosts mount."""

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from contract.errors import SandboxUnavailable
from workers.sandboxd.store.base import MAX_FACTS_BYTES, NotStored, StoredFacts, Tally, encode_facts, is_name, parse_facts, split_name

_READ_BYTES = 1024 * 1024
_CHECK_EVERY_BYTES = 16 * 1024 * 1024
_FORGOTTEN_S = 86_400.0
_DATA, _FACTS, _PART = ".tar", ".json", ".part"

T = TypeVar("T")


class FolderStore:
    """A parcel is `<tenant>/<id>.tar` and, written last, `<tenant>/<id>.json`. Folders are 0700, files 0600, all on the disk before `put` returns.

    `free_bytes`: nothing is kept when the disk would have less than this left.
    """

    def __init__(self, folder: Path, free_bytes: int = 0) -> None:
        self._folder = folder
        self._free_bytes = free_bytes

    async def put(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        tenant, parcel = split_name(name)
        failed = f"the folder {self._folder} did not take the files of a session"
        place = await _do(failed, lambda: self._make_folder(tenant))
        part = place / f".{parcel}.{secrets.token_hex(8)}{_PART}"
        try:
            with await _do(failed, lambda: _create(part)) as file:
                facts = await self._write(file, chunks, failed)
            await _do(failed, lambda: _publish(part, place / (parcel + _DATA), place / (parcel + _FACTS), facts))
        finally:
            await _do(failed, lambda: part.unlink(missing_ok=True))
        return facts

    async def describe(self, name: str) -> StoredFacts:
        tenant, parcel = split_name(name)
        path = self._folder / tenant / (parcel + _FACTS)
        return parse_facts(name, await _do(f"the stored files {name} cannot be read", lambda: _read_facts(path, name)))

    async def get(self, name: str) -> AsyncGenerator[bytes]:
        wanted, tally, failed = await self.describe(name), Tally(), f"the stored files {name} cannot be read"
        tenant, parcel = split_name(name)
        with await _do(failed, lambda: open(self._folder / tenant / (parcel + _DATA), "rb", 0)) as file:
            while chunk := await _do(failed, lambda: file.read(_READ_BYTES)):
                tally.add(chunk)
                yield chunk
        tally.check(name, wanted)

    async def delete(self, name: str) -> bool:
        tenant, parcel = split_name(name)
        return await _do(f"the stored files {name} cannot be deleted", lambda: _delete(self._folder / tenant, parcel))

    async def list(self, prefix: str = "") -> list[str]:
        return await _do(f"the folder {self._folder} cannot be listed", lambda: list(self._find(prefix)))

    def sweep(self) -> None:
        """Delete what was begun a day ago or more and never ended."""
        without_facts = (path for path in self._folder.glob(f"*/*{_DATA}") if not path.with_suffix(_FACTS).exists())
        for path in [*self._folder.glob(f"*/.*{_PART}"), *without_facts]:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                    path.unlink()

    def _make_folder(self, tenant: str) -> Path:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self._folder / tenant
        place.mkdir(mode=0o700, exist_ok=True)
        return place

    def _find(self, prefix: str) -> Sequence[str]:
        names = (f"{path.parent.name}/{path.stem}" for path in self._folder.glob(f"*/*{_FACTS}"))
        return sorted(name for name in names if is_name(name) and name.startswith(prefix))

    async def _write(self, file: BinaryIO, chunks: AsyncIterator[bytes], failed: str) -> StoredFacts:
        tally, unchecked = Tally(), _CHECK_EVERY_BYTES
        async for chunk in chunks:
            tally.add(chunk)
            unchecked += len(chunk)
            if unchecked >= _CHECK_EVERY_BYTES:
                unchecked = 0
                await _do(failed, self._check_room)
            await _do(failed, functools.partial(_write_all, file, chunk))
        await _do(failed, lambda: os.fsync(file.fileno()))
        return tally.facts()

    def _check_room(self) -> None:
        if shutil.disk_usage(self._folder).free < self._free_bytes:
            raise SandboxUnavailable(
                f"the disk of {self._folder} has less than {self._free_bytes} bytes free: make room, or set TOOLCREW_WORKSPACE_STORE to another place"
            )


async def _do(what: str, work: Callable[[], T]) -> T:
    """In a thread: a disk may be slow, and a folder of another host's slower. Raises SandboxUnavailable, saying `what` could not be done."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise SandboxUnavailable(
            f"{what} ({error}): see its rights and its disk, or set TOOLCREW_WORKSPACE_STORE to another place"
        ) from error


def _create(path: Path) -> BinaryIO:
    return open(path, "xb", 0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _read_facts(path: Path, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FACTS_BYTES)
    except FileNotFoundError:
        raise NotStored(name) from None


def _publish(part: Path, data: Path, facts_path: Path, facts: StoredFacts) -> None:
    """Facts of an older parcel go first: what they would say of the new one is wrong."""
    facts_path.unlink(missing_ok=True)
    part.rename(data)
    beside = facts_path.with_name(f".{facts_path.stem}.{secrets.token_hex(8)}{_PART}")
    try:
        with _create(beside) as file:
            _write_all(file, encode_facts(facts))
            os.fsync(file.fileno())
        beside.rename(facts_path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(data.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _delete(place: Path, parcel: str) -> bool:
    was_there = True
    try:
        (place / (parcel + _FACTS)).unlink()
    except FileNotFoundError:
        was_there = False
    (place / (parcel + _DATA)).unlink(missing_ok=True)
    return was_there
