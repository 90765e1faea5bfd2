"""Archives in whatever fsspec can write to: object stores, remote file systems. The only file that imports fsspec."""

import asyncio
import contextlib
import functools
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from contract.errors import ConfigError, SandboxUnavailable
from store.archives.base import (
    CHECK_EVERY_BYTES,
    MAX_FACTS_BYTES,
    STATE_SETTING,
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

log = structlog.get_logger(__name__)

_READ_BYTES = 1024 * 1024
_PART_BYTES = 8 * 1024 * 1024
"""What is held of a file that is sent as it comes."""
_DATA, _FACTS = ".tar", ".json"
_SPOOLED = "archive-"
_SEND_S = 480.0
"""For a whole archive on its way to the store."""

T = TypeVar("T")


class FsspecStore:
    """An archive is `<url>/<tenant>/<id>.tar` and, written last, `<id>.json`. It is gathered in `spool`, a folder of
    this process alone, and then sent. `free_bytes`: nothing is gathered when its disk would have less than this left.
    Without a `spool` it is sent as it comes, for sources that may wait for the store.

    Raises ConfigError when fsspec, or the package that its protocol needs, is not installed.
    """

    def __init__(self, url: str, spool: Path | None, free_bytes: int = 0) -> None:
        self._spool = spool
        self._free_bytes = free_bytes
        self._threads = StoreThreads()
        self._fs, self._root = _open_file_system(url)

    async def put(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        split_name(name)
        if self._spool is None:
            return await self._send_directly(name, chunks)
        with _spooled(self._spool) as file:
            facts, is_void = await self._gather(file, chunks), threading.Event()
            try:
                await self._do(
                    "did not take the files of a session",
                    lambda: self._send(name, Path(file.name), facts, is_void),
                    _SEND_S,
                )
            except BaseException:
                is_void.set()
                raise
        return facts

    async def describe(self, name: str) -> StoredFacts:
        split_name(name)
        return parse_facts(name, await self._do(f"did not tell of {name}", lambda: self._read_facts(name)))

    async def get(self, name: str) -> AsyncGenerator[bytes]:
        wanted, tally, failed = await self.describe(name), ArchiveHash(), f"did not give {name}"
        file = await self._do(failed, lambda: self._fs.open(self._path(name, _DATA), "rb"))
        try:
            while chunk := bytes(await self._do(failed, lambda: file.read(_READ_BYTES))):
                tally.add(chunk)
                yield chunk
        finally:
            await self._do(failed, file.close)
        tally.check(name, wanted)

    async def delete(self, name: str) -> bool:
        split_name(name)
        return await self._do(f"did not delete {name}", lambda: self._delete(name))

    async def list(self, prefix: str = "") -> list[str]:
        return await self._do("did not list what it holds", lambda: list(self._find(prefix)))

    async def object_size(self, path: str) -> int:
        return await self._do(f"did not tell of {path}", lambda: self._object_size(path))

    async def read_object(self, path: str) -> AsyncGenerator[bytes]:
        failed = f"did not give {path}"
        file = await self._do(failed, lambda: self._fs.open(f"{self._root.rstrip('/')}/{path}", "rb"))
        try:
            while chunk := bytes(await self._do(failed, lambda: file.read(_READ_BYTES))):
                yield chunk
        finally:
            await self._do(failed, file.close)

    def sweep(self) -> None:
        """Delete what a process that was killed has left in the spool."""
        if self._spool is None:
            return
        for path in self._spool.glob(f"{_SPOOLED}*"):
            path.unlink(missing_ok=True)

    async def _send_directly(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        tally, failed = ArchiveHash(), "did not take a file"
        await self._do(failed, lambda: self._prepare(name))
        file = await self._do(failed, lambda: self._fs.open(self._path(name, _DATA), "wb", block_size=_PART_BYTES))
        try:
            async for chunk in chunks:
                tally.add(chunk)
                await self._do(failed, functools.partial(write_all, file, chunk), _SEND_S)
            await self._do(failed, file.close, _SEND_S)
            facts = tally.facts()
            await self._do(failed, lambda: self._fs.pipe_file(self._path(name, _FACTS), encode_facts(facts)))
        except BaseException:
            with contextlib.suppress(SandboxUnavailable):
                await asyncio.shield(self._do("did not delete a part of a file", lambda: self._discard(name, file)))
            raise
        return facts

    def _prepare(self, name: str) -> None:
        """Delete the facts of an older archive first: they would be wrong for the new one."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name, _FACTS))
        self._fs.makedirs(self._path(name, "").rpartition("/")[0], exist_ok=True)

    def _discard(self, name: str, file: Any) -> None:
        """Delete what was sent of an archive that is not whole."""
        with contextlib.suppress(Exception):
            file.discard()
            # Otherwise the garbage collector would finish the file.
            file.closed = True
        self._delete(name)

    def _object_size(self, path: str) -> int:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(f"{self._root.rstrip('/')}/{path}")
        except FileNotFoundError:
            raise NotStored(path) from None
        if info.get("type") != "file" or info.get("size") is None:
            raise NotStored(path)
        return int(info["size"])

    async def _gather(self, file: Any, chunks: AsyncIterator[bytes]) -> StoredFacts:
        tally, unchecked, folder = ArchiveHash(), CHECK_EVERY_BYTES, Path(file.name).parent
        async for chunk in chunks:
            tally.add(chunk)
            unchecked += len(chunk)
            try:
                if unchecked >= CHECK_EVERY_BYTES:
                    unchecked = 0
                    await self._threads.run(functools.partial(check_room, folder, self._free_bytes, STATE_SETTING))
                await self._threads.run(functools.partial(write_all, file, chunk))
            except OSError as error:
                raise _no_spool(error) from error
        return tally.facts()

    def _send(self, name: str, local: Path, facts: StoredFacts, is_void: threading.Event) -> None:
        """Send an archive. `is_void`: the caller does not wait for it any more."""
        self._prepare(name)
        try:
            self._fs.put_file(str(local), self._path(name, _DATA))
            if is_void.is_set():
                raise TimeoutError("sent too late")
            self._fs.pipe_file(self._path(name, _FACTS), encode_facts(facts))
        except Exception:  # whatever a store's package may raise: without facts nobody would find the rest to delete it
            with contextlib.suppress(Exception):
                self._delete(name)
            raise

    def _read_facts(self, name: str) -> bytes:
        try:
            with self._fs.open(self._path(name, _FACTS), "rb") as file:
                return bytes(file.read(MAX_FACTS_BYTES))
        except FileNotFoundError:
            raise NotStored(name) from None

    def _delete(self, name: str) -> bool:
        was_there = bool(self._fs.exists(self._path(name, _FACTS)))
        for suffix in (_FACTS, _DATA):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name, suffix))
        return was_there

    def _find(self, prefix: str) -> Sequence[str]:
        """A store may keep what it lists, and others write to it: what it keeps is forgotten first."""
        self._fs.invalidate_cache()
        tenant, is_whole, _ = prefix.partition("/")
        try:
            found = self._fs.find(f"{self._root.rstrip('/')}/{tenant}" if is_whole else self._root)
        except FileNotFoundError:
            return []
        names = (
            "/".join(str(path).removesuffix(_FACTS).rsplit("/", 2)[-2:]) for path in found if str(path).endswith(_FACTS)
        )
        return sorted(name for name in names if is_name(name) and name.startswith(prefix))

    def _path(self, name: str, suffix: str) -> str:
        return f"{self._root.rstrip('/')}/{name}{suffix}"

    async def _do(self, what: str, work: Callable[[], T], within_s: float | None = None) -> T:
        """Each store's package raises errors of its own, and no two have a base in common. Their words are the
        operator's to read.
        """
        try:
            return await self._threads.run(work, within_s)
        except NotStored:
            raise
        except Exception as error:  # whatever a store's package may raise
            log.warning("store_failed", what=what, error=repr(error)[:1000])
            raise SandboxUnavailable(
                f"the store of TOOLCREW_WORKSPACE_STORE {what} ({type(error).__name__}): see that it is up and what "
                "rights this host has there; sandboxd's log has its words"
            ) from error


def _open_file_system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            f"TOOLCREW_WORKSPACE_STORE is a {protocol} URL and fsspec is not installed: pip install 'toolcrew[store]', "
            "or give a folder"
        ) from None
    try:
        system, root = url_to_fs(url)
    except ImportError as error:
        raise ConfigError(
            f"TOOLCREW_WORKSPACE_STORE is a {protocol} URL and its package is not installed: {error}"
        ) from error
    except Exception as error:  # whatever a package of a store's may raise
        raise ConfigError(
            f"TOOLCREW_WORKSPACE_STORE: {protocol} cannot be opened ({type(error).__name__}: {str(error)[:300]})"
        ) from error
    return system, str(root)


@contextlib.contextmanager
def _spooled(folder: Path) -> Iterator[Any]:
    """A file that is gone afterwards."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # closed just below
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=_SPOOLED, buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _no_spool(error) from error
    with file:
        yield file


def _no_spool(error: OSError) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"sandboxd's state folder did not take the files of a session ({error}): see its rights, and make room on its "
        "disk"
    )
