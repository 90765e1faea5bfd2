"""Archives in any storage that fsspec supports: object stores and remote file systems. Only this module imports
fsspec.

Invariant: an archive without its facts (a file with size and hash) does not exist for readers. The facts are written
last.
"""

import asyncio
import contextlib
import functools
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from toolcrew.archives.base import (
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
from toolcrew.contract.errors import ConfigError, SandboxUnavailable

log = structlog.get_logger(__name__)

_READ_BYTES = 1024 * 1024
_PART_BYTES = 8 * 1024 * 1024
"""Size of the parts, in bytes, in which an archive is sent without first being collected in a local folder."""
_DATA, _FACTS = ".tar", ".json"
_SPOOLED = "archive-"
_SEND_S = 480.0
"""Time limit of sending a whole archive to the store, in seconds."""

T = TypeVar("T")


class FsspecStore:
    """A store behind fsspec. An archive is `<url>/<tenant>/<id>.tar` and `<id>.json`; the `.json` is written last. The
    store first collects an archive in `spool`, a folder of this process alone, and then sends it. `free_bytes`: no
    archive is collected if less space would remain on the disk of the spool. Without a `spool`, each chunk is sent at
    once, so the source of the chunks must be able to wait for the network.

    Raises ConfigError: fsspec is not installed, or the package for the protocol of the URL.
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
                    "did not store the files of a session",
                    lambda: self._send(name, Path(file.name), facts, is_void),
                    _SEND_S,
                )
            except BaseException:
                is_void.set()
                raise
        return facts

    async def describe(self, name: str) -> StoredFacts:
        split_name(name)
        return parse_facts(
            name, await self._do(f"did not return the metadata of {name}", lambda: self._read_facts(name))
        )

    async def get(self, name: str) -> AsyncGenerator[bytes]:
        expected, tally, failed = await self.describe(name), ArchiveHash(), f"did not return {name}"
        file = await self._do(failed, lambda: self._fs.open(self._path(name, _DATA), "rb"))
        try:
            while chunk := bytes(await self._do(failed, lambda: file.read(_READ_BYTES))):
                tally.add(chunk)
                yield chunk
        finally:
            await self._do(failed, file.close)
        tally.check(name, expected)

    async def delete(self, name: str) -> bool:
        split_name(name)
        return await self._do(f"did not delete {name}", lambda: self._delete(name))

    async def list(self, prefix: str = "") -> list[str]:
        return await self._do("did not list its files", lambda: list(self._find(prefix)))

    async def object_size(self, path: str) -> int:
        return await self._do(f"did not return the size of {path}", lambda: self._object_size(path))

    async def read_object(self, path: str) -> AsyncGenerator[bytes]:
        failed = f"did not return {path}"
        file = await self._do(failed, lambda: self._fs.open(f"{self._root.rstrip('/')}/{path}", "rb"))
        try:
            while chunk := bytes(await self._do(failed, lambda: file.read(_READ_BYTES))):
                yield chunk
        finally:
            await self._do(failed, file.close)

    def sweep(self) -> None:
        """Delete files that a killed process has left in the spool."""
        if self._spool is None:
            return
        for path in self._spool.glob(f"{_SPOOLED}*"):
            path.unlink(missing_ok=True)

    async def _send_directly(self, name: str, chunks: AsyncIterator[bytes]) -> StoredFacts:
        tally, failed = ArchiveHash(), "did not store a file"
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
                # The shield completes the deletion even if the task is cancelled again.
                await asyncio.shield(self._do("did not delete a part of a file", lambda: self._discard(name, file)))
            raise
        return facts

    def _prepare(self, name: str) -> None:
        """Delete the facts of an older archive, because they would be wrong for the new archive. Create its folder."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name, _FACTS))
        self._fs.makedirs(self._path(name, "").rpartition("/")[0], exist_ok=True)

    def _discard(self, name: str, file: Any) -> None:
        """Delete the sent part of an incomplete archive."""
        with contextlib.suppress(Exception):
            file.discard()
            # Mark the file as closed. Otherwise the garbage collector would close it and thereby complete the upload.
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
        """Send an archive. `is_void`: set when the caller no longer waits; the archive must then not become visible."""
        self._prepare(name)
        try:
            self._fs.put_file(str(local), self._path(name, _DATA))
            if is_void.is_set():
                raise TimeoutError("the file was not sent in time")
            self._fs.pipe_file(self._path(name, _FACTS), encode_facts(facts))
        except Exception:  # any error of the package; data without facts would never be found and deleted
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
        """Return the sorted names of archives. The cache is emptied first, because other processes write to the store
        too.
        """
        self._fs.invalidate_cache()
        tenant, is_whole, _ = prefix.partition("/")
        try:
            paths = self._fs.find(f"{self._root.rstrip('/')}/{tenant}" if is_whole else self._root)
        except FileNotFoundError:
            return []
        names = (
            "/".join(str(path).removesuffix(_FACTS).rsplit("/", 2)[-2:]) for path in paths if str(path).endswith(_FACTS)
        )
        return sorted(name for name in names if is_name(name) and name.startswith(prefix))

    def _path(self, name: str, suffix: str) -> str:
        return f"{self._root.rstrip('/')}/{name}{suffix}"

    async def _do(self, failure: str, work: Callable[[], T], within_s: float | None = None) -> T:
        """Run blocking work in a thread. The packages of the stores have no common base class of errors, so every
        error becomes SandboxUnavailable. The log contains the original error.
        """
        try:
            return await self._threads.run(work, within_s)
        except NotStored:
            raise
        except Exception as error:  # any error of the store's package
            log.warning("store_failed", failure=failure, error=repr(error)[:1000])
            raise SandboxUnavailable(
                f"the store of TOOLCREW_WORKSPACE_STORE {failure} ({type(error).__name__}): check that it is "
                "running and which permissions this host has. The log of sandboxd contains the error"
            ) from error


def _open_file_system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            f"TOOLCREW_WORKSPACE_STORE is a {protocol} URL and fsspec is not installed: pip install "
            "'toolcrew[store]', or set a folder"
        ) from None
    try:
        system, root = url_to_fs(url)
    except ImportError as error:
        raise ConfigError(
            f"TOOLCREW_WORKSPACE_STORE is a {protocol} URL and its package is missing ({error}): install it"
        ) from error
    except Exception as error:  # any error of the store's package
        raise ConfigError(
            f"TOOLCREW_WORKSPACE_STORE: {protocol} cannot be opened ({type(error).__name__}: "
            f"{str(error)[:300]}): correct the URL"
        ) from error
    return system, str(root)


@contextlib.contextmanager
def _spooled(folder: Path) -> Iterator[Any]:
    """Yield a temporary file, which is deleted afterwards."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # the with statement below closes the file
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=_SPOOLED, buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _no_spool(error) from error
    with file:
        yield file


def _no_spool(error: OSError) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"the files of a session cannot be written to the state folder of sandboxd ({error}): check its "
        "permissions, and free space on its disk"
    )
