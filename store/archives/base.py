"""The interface of a store: whole archives under names, each with its size and sha256 next to it."""

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from contract.errors import SandboxUnavailable
from store.tasks import in_thread

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}/[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_FACTS_BYTES = 4096
STORE_SETTING, STATE_SETTING = "TOOLCREW_WORKSPACE_STORE", "TOOLCREW_SANDBOXD_STATE"
CHECK_EVERY_BYTES = 16 * 1024 * 1024
"""How much may be written between two looks at the free space of a disk."""
_LAYOUT = 1
"""Of what is kept: the names of files in an archive, and the words of the facts."""
ANSWER_S = 60.0
"""For one piece of work: a read, a write, a list."""
_AT_ONCE = 16
T = TypeVar("T")


class NotStored(Exception):
    """Nothing whole is kept under that name."""


@dataclass(frozen=True)
class StoredFacts:
    """Size in bytes and sha256, in hex, of what is kept."""

    bytes: int
    sha256: str


class ArchiveStore(Protocol):
    """Keeps archives. A name is `<tenant>/<id>`; any other raises ValueError. What cannot be written or read is
    SandboxUnavailable, with what to do.

    An archive is there whole or not at all, whoever dies while it is written.
    """

    async def put(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        """Keep all that `chunks` give, in place of what had that name. When they raise, nothing new is kept.

        Takes the chunks as fast as a disk does: who gives them may be a guest that waits.
        """
        ...

    async def describe(self, name: str) -> StoredFacts:
        """Raises NotStored."""
        ...

    def get(self, name: str) -> AsyncGenerator[bytes]:
        """The archive in order. Raises NotStored, and SandboxUnavailable at its end when it is not what was put: then
        all of it is void.
        """
        ...

    async def delete(self, name: str) -> bool:
        """False when nothing was kept under that name."""
        ...

    async def list(self, prefix: str = "") -> list[str]:
        """Names that begin with `prefix`, sorted."""
        ...

    async def object_size(self, path: str) -> int:
        """Return the size of a file that someone else has put into the store. `path`: from `parse_location`.

        Raises NotStored, also for a link that leads out of the path's first folder.
        """
        ...

    def read_object(self, path: str) -> AsyncGenerator[bytes]:
        """Read such a file. Raises NotStored."""
        ...


def split_name(name: str) -> tuple[str, str]:
    """Tenant and id of a name. Raises ValueError: no name may lead out of a store."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name[:200]!r} is no name of an archive: <tenant>/<id>, each of A-Z, a-z, 0-9, _ and -, at most 64"
        )
    tenant, _, archive = name.partition("/")
    return tenant, archive


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


class ArchiveHash:
    """Counts and hashes what passes; judges it at the end."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        self.bytes += len(chunk)
        self._sha256.update(chunk)

    def facts(self) -> StoredFacts:
        return StoredFacts(self.bytes, self._sha256.hexdigest())

    def check(self, name: str, wanted: StoredFacts) -> None:
        """Raises SandboxUnavailable when what passed is not what was put."""
        if self.facts() != wanted:
            raise SandboxUnavailable(
                f"the stored files {name} are damaged: {self.bytes} bytes with sha256 {self._sha256.hexdigest()[:12]} "
                f"were read and {wanted.bytes} with {wanted.sha256[:12]} were written; see the store's disk, and "
                "restore another checkpoint"
            )


def check_room(folder: Path, free_bytes: int, setting: str) -> None:
    """Blocks. Raises SandboxUnavailable when the disk of a folder, which `setting` names, has less than this left;
    OSError.
    """
    if shutil.disk_usage(folder).free < free_bytes:
        raise SandboxUnavailable(
            f"the disk of {folder} has less than {free_bytes} bytes free: make room there, or set {setting} to another "
            "place"
        )


def write_all(file: Any, data: bytes) -> None:
    """To an unbuffered file, which may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def encode_facts(facts: StoredFacts) -> bytes:
    """As they are kept beside an archive."""
    return json.dumps({"layout": _LAYOUT, "bytes": facts.bytes, "sha256": facts.sha256}).encode()


def parse_facts(name: str, data: bytes) -> StoredFacts:
    """Facts that were kept. Raises SandboxUnavailable when they are none, or of a layout that this version does not
    know.
    """
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        told = None
    told = told if isinstance(told, dict) else {}
    size, digest, layout = told.get("bytes"), told.get("sha256"), told.get("layout")
    if (
        type(size) is not int
        or size < 0
        or not isinstance(digest, str)
        or _SHA256.fullmatch(digest) is None
        or type(layout) is not int
    ):
        raise SandboxUnavailable(
            f"what is kept about the stored files {name} is damaged: see the store's disk, and restore another "
            "checkpoint"
        )
    if layout != _LAYOUT:
        raise SandboxUnavailable(
            f"the stored files {name} have layout {layout}, and this version knows {_LAYOUT}: restore them by the "
            "version that kept them, or restore another checkpoint"
        )
    return StoredFacts(size, digest)


async def in_pieces(chunks: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of `size`, the last one shorter."""
    gathered = bytearray()
    async for chunk in chunks:
        gathered += chunk
        while len(gathered) >= size:
            yield bytes(gathered[:size])
            del gathered[:size]
    if gathered:
        yield bytes(gathered)


class StoreThreads:
    """So many pieces of work at a time; one that hangs keeps its turn until it ends."""

    def __init__(self, answer_s: float = ANSWER_S, at_once: int = _AT_ONCE) -> None:
        self._answer_s = answer_s
        self._turns = asyncio.Semaphore(at_once)

    async def run(self, work: Callable[[], T], within_s: float | None = None) -> T:
        """What blocking work gives. Raises what it raises, and TimeoutError when it has not ended in time: nobody can
        end it, it may do so later.
        """
        limit_s = within_s or self._answer_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._turns.acquire()
                return await asyncio.shield(self._start(work))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no answer within {limit_s:g} s") from error

    def _start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        try:
            running = in_thread(work, "store")
        except BaseException:
            self._turns.release()
            raise
        running.add_done_callback(self._give_back)
        return running

    def _give_back(self, running: "asyncio.Future[T]") -> None:
        self._turns.release()
        running.exception()  # whoever asked may have left: then nobody else takes it
