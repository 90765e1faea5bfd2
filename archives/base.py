"""The interface of an archive store. A store keeps whole archives under names, with the size and the sha256 of each."""

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from toolcrew.concurrency.tasks import in_thread
from toolcrew.contract.errors import SandboxUnavailable

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}/[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_FACTS_BYTES = 4096
STORE_SETTING, STATE_SETTING = "TOOLCREW_WORKSPACE_STORE", "TOOLCREW_SANDBOXD_STATE"
CHECK_EVERY_BYTES = 16 * 1024 * 1024
"""Number of bytes that are written between two checks of the free disk space."""
_LAYOUT = 1
"""Version of the storage format: the names of the stored files, and the fields of the facts (size and hash) of an
archive.
"""
ANSWER_S = 60.0
"""Time limit of one operation (a read, a write or a list), in seconds."""
_AT_ONCE = 16
T = TypeVar("T")


class NotStored(Exception):
    """Raised when the store has no complete archive of that name."""


@dataclass(frozen=True)
class StoredFacts:
    """Size in bytes, and sha256 in hex, of a stored archive."""

    bytes: int
    sha256: str


class ArchiveStore(Protocol):
    """Stores archives. A name is `<tenant>/<id>`; any other name raises ValueError. A failed read or write raises
    SandboxUnavailable with advice.

    Invariant: an archive exists completely or not at all, even if a process dies while it writes.
    """

    async def put(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        """Store all `chunks` as an archive, in place of an earlier archive of that name. If `chunks` raises an
        exception, nothing new is stored.

        The method must accept chunks at the speed of a disk: the source may be a sandbox that waits until its data is
        read.
        """
        ...

    async def describe(self, name: str) -> StoredFacts:
        """Return the size and the hash of an archive. Raises NotStored: no archive has that name."""
        ...

    def get(self, name: str) -> AsyncGenerator[bytes]:
        """Yield an archive in order. Raises NotStored: no archive has that name. Raises SandboxUnavailable at the end
        if the data differs from the stored archive; the caller must then discard all of it.
        """
        ...

    async def delete(self, name: str) -> bool:
        """Delete an archive. Return False if no archive has that name."""
        ...

    async def list(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`, sorted."""
        ...

    async def object_size(self, path: str) -> int:
        """Return the size of a file that another program has put into the store. `path`: the result of
        `parse_location`.

        Raises NotStored: there is no such file, or a symbolic link leads out of the first folder of the path.
        """
        ...

    def read_object(self, path: str) -> AsyncGenerator[bytes]:
        """Yield the content of a file that another program has put into the store. `path`: the result of
        `parse_location`. Raises NotStored: there is no such file.
        """
        ...


def split_name(name: str) -> tuple[str, str]:
    """Return the tenant and the id in a name. Raises ValueError: the name is invalid. The check prevents names that
    lead out of a store.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name[:200]!r} is not a name of an archive: use <tenant>/<id>, each with at most 64 of A-Z, a-z, 0-9, "
            "_ and -"
        )
    tenant, _, archive = name.partition("/")
    return tenant, archive


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


class ArchiveHash:
    """Counts and hashes the bytes of an archive, and checks them at the end."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        self.bytes += len(chunk)
        self._sha256.update(chunk)

    def facts(self) -> StoredFacts:
        return StoredFacts(self.bytes, self._sha256.hexdigest())

    def check(self, name: str, expected: StoredFacts) -> None:
        """Raise SandboxUnavailable if the bytes differ from the stored archive."""
        if self.facts() != expected:
            raise SandboxUnavailable(
                f"the stored files {name} are damaged: {self.bytes} bytes with sha256 "
                f"{self._sha256.hexdigest()[:12]} were read, and {expected.bytes} bytes with {expected.sha256[:12]} "
                "were written. Check the disk of the store, and restore another checkpoint"
            )


def check_room(folder: Path, free_bytes: int, setting: str) -> None:
    """Check the free space on the disk of a folder; blocking. Raises SandboxUnavailable: less than `free_bytes` are
    free; the message names `setting`. Raises OSError: the disk cannot be read.
    """
    if shutil.disk_usage(folder).free < free_bytes:
        raise SandboxUnavailable(
            f"the disk of {folder} has less than {free_bytes} bytes free: free space, or set {setting} to another "
            "folder"
        )


def write_all(file: Any, data: bytes) -> None:
    """Write all data to an unbuffered file, whose `write` may accept only a part."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def encode_facts(facts: StoredFacts) -> bytes:
    """Return the bytes that store the facts (size and hash) of an archive."""
    return json.dumps({"layout": _LAYOUT, "bytes": facts.bytes, "sha256": facts.sha256}).encode()


def parse_facts(name: str, data: bytes) -> StoredFacts:
    """Return stored facts. Raises SandboxUnavailable: the facts are damaged, or this version does not know their
    layout.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    size, digest, layout = fields.get("bytes"), fields.get("sha256"), fields.get("layout")
    if (
        type(size) is not int
        or size < 0
        or not isinstance(digest, str)
        or _SHA256.fullmatch(digest) is None
        or type(layout) is not int
    ):
        raise SandboxUnavailable(
            f"the metadata of the stored files {name} is damaged: check the disk of the store, and restore another "
            "checkpoint"
        )
    if layout != _LAYOUT:
        raise SandboxUnavailable(
            f"the stored files {name} have layout {layout}, and this version supports only {_LAYOUT}: restore them "
            "with the version that stored them, or restore another checkpoint"
        )
    return StoredFacts(size, digest)


async def in_pieces(chunks: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of `size` bytes; the last piece may be shorter."""
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        while len(gathered) >= size:
            yield bytes(gathered[:size])
            del gathered[:size]
    if gathered:
        yield bytes(gathered)


async def read_head(chunks: AsyncIterator[bytes], size: int) -> bytes:
    """Return the first chunks, joined: at least `size` bytes, or all bytes if there are fewer."""
    head = bytearray()
    while len(head) < size and (chunk := await anext(chunks, None)) is not None:
        head += chunk
    return bytes(head)


async def join_chunks(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield `head`, the bytes that `read_head` returned, and then the remaining chunks."""
    yield head
    async for chunk in rest:
        yield chunk


class StoreThreads:
    """Limits the number of operations that run at the same time. An operation that hangs keeps its slot until it
    ends.
    """

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self, work: Callable[[], T], within_s: float | None = None) -> T:
        """Run blocking work in a thread, and return its result. Raises the errors of the work. Raises TimeoutError:
        the work has not ended in time. A thread cannot be stopped, so the work may end later.
        """
        limit_s = within_s or self._answer_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._slots.acquire()
                # The shield keeps the thread's slot occupied after a timeout. Otherwise hanging threads would
                # accumulate.
                return await asyncio.shield(self._start(work))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no answer within {limit_s:g} s") from error

    def _start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        try:
            running = in_thread(work, "store")
        except BaseException:
            self._slots.release()
            raise
        running.add_done_callback(self._give_back)
        return running

    def _give_back(self, running: "asyncio.Future[T]") -> None:
        self._slots.release()
        running.exception()  # reading the exception prevents asyncio's warning if the caller has given up
