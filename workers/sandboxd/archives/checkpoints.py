"""Checkpoints: archives of a tenant's sessions in a store, by random ids that only their tenant can use. The same store
also has the tenant's uploads and artifacts (contract/file_ids.py).
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from toolcrew.archives.base import ArchiveStore, NotStored
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.file_ids import KEEP_S, file_created_at, is_file_id
from toolcrew.workers.sandboxd.archives.packing import Packing, PackingGuest, pack_roots
from toolcrew.workers.sandboxd.archives.root_changes import pack_changes, pack_with_head, unpack_archive
from toolcrew.workers.sandboxd.budgets import MemoryBudget
from toolcrew.workers.sandboxd.disks.changes import RootChanges

MAX_ARCHIVE_BYTES = 16 * 1024**3
WHOLE_S = 500.0
"""Time limit for the whole operation in the guest and the store, in seconds. It is shorter than the time that workers
wait for an answer.
"""
MAX_CHECKPOINTS = 100
"""Maximum number of checkpoints of a tenant in one store. Checkpoints use the operator's disk."""
AUTOMATIC_MAX_AGE_S = 7 * 86_400.0
"""Lifetime of an automatic checkpoint, in seconds, if its session makes no newer one."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_AUTOMATIC_ID = re.compile(r"auto-([0-9a-f]{8,12})-[A-Za-z0-9_-]{24}")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A stored checkpoint: size in bytes and sha256 in hex. `skipped`: number of sockets, which are not stored.
    `files_changed`: files changed while they were read.
    """

    id: str
    bytes: int
    sha256: str
    skipped: int = 0
    files_changed: bool = False


ListChanges = Callable[[], AbstractAsyncContextManager[RootChanges | None]]
"""Lists the changes of a session's root file system; None if it is read-only."""


@contextlib.asynccontextmanager
async def _list_none() -> AsyncIterator[None]:
    yield None


class Checkpoints:
    """Saves the files of sandboxes and loads them into others. `max_checkpoints`: limit per tenant;
    None for no limit. `save_s`: time limit of one save, in seconds. `memory`: the budget of all archives.

    All methods raise SandboxUnavailable when the store fails or the sandbox is lost.
    """

    def __init__(
        self,
        store: ArchiveStore,
        *,
        max_checkpoints: int | None = None,
        save_s: float = WHOLE_S,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._store = store
        self._memory = memory or MemoryBudget()
        self._max_checkpoints = max_checkpoints
        self._save_s = save_s

    async def save(
        self,
        tenant: str,
        sandbox: PackingGuest,
        *,
        roots: tuple[str, ...],
        max_bytes: int = MAX_ARCHIVE_BYTES,
        list_changes: ListChanges = _list_none,
        is_automatic: bool = False,
    ) -> StoredCheckpoint:
        """Save folders of a sandbox (packing.find_roots: all of the session), and the changes of its root file system.
        `is_automatic`: no client requested it, so it does not count towards the limit and is deleted by its age.

        Raises ToolFailure: NO_SPACE when the tenant has too many, TIMEOUT. Also raises the errors of `Packing.chunks`.
        """
        if not is_automatic:
            await self._check_count(tenant)
        name = _build_automatic_id() if is_automatic else secrets.token_urlsafe(18)
        async with (
            _limit_time("kept", self._save_s),
            self._memory.hold_archive(tenant),
            list_changes() as changes,
        ):
            packing = _build_packing(sandbox, changes, roots, max_bytes)
            async with contextlib.aclosing(packing.chunks()) as chunks:
                stored = await self._store.put(f"{tenant}/{name}", pack_with_head(changes, chunks))
        facts = packing.facts
        assert facts is not None
        return StoredCheckpoint(name, stored.bytes, stored.sha256, facts.skipped, facts.files_changed)

    async def load(
        self,
        tenant: str,
        checkpoint: str,
        sandbox: PackingGuest,
        *,
        root_image: str | None = None,
    ) -> bool:
        """Unpack a checkpoint into an empty sandbox. After an exception the sandbox contains only a part of the files
        and must not be used. `root_image`: the content id of the sandbox's image, if its root file system may be
        changed.

        Returns False if changes of the root file system were left out, because they belong to another image, or because
        the root file system of this sandbox is read-only. Raises ToolFailure: FILE_NOT_FOUND when the tenant has no
        such checkpoint, TIMEOUT. Also raises the errors of `unpack`.
        """
        name = _name(tenant, checkpoint)
        try:
            facts = await self._store.describe(name)
            async with (
                _limit_time("restored", WHOLE_S),
                self._memory.hold_archive(tenant),
                contextlib.aclosing(self._store.get(name)) as chunks,
            ):
                return await unpack_archive(sandbox, chunks, facts.bytes, root_image)
        except NotStored:
            raise _build_missing_error(checkpoint) from None

    async def forget(self, tenant: str, checkpoint: str) -> bool:
        """Delete a checkpoint. Return False when the tenant has no checkpoint with this id."""
        return await self._store.delete(_name(tenant, checkpoint))

    async def forget_old(self, max_age_s: float = AUTOMATIC_MAX_AGE_S) -> int:
        """Delete the automatic checkpoints of this store that are older than `max_age_s` seconds, and uploads and
        artifacts that are older than KEEP_S seconds. Return the number of deleted archives.
        """
        now = time.time()
        return await self._forget_all(
            [name for name in await self._store.list() if _is_older(name, now - max_age_s, now - KEEP_S)]
        )

    async def _forget_all(self, names: Sequence[str]) -> int:
        for name in names:
            await self._store.delete(name)
        return len(names)

    async def forget_all_but(self, kept_ids: Set[tuple[str, str]]) -> int:
        """Delete every archive whose tenant and id are not in `kept_ids`, and return the number. Use this only for a
        store of a single sandboxd.
        """
        names = {f"{tenant}/{checkpoint}" for tenant, checkpoint in kept_ids}
        return await self._forget_all([name for name in await self._store.list() if name not in names])

    async def _check_count(self, tenant: str) -> None:
        if self._max_checkpoints is None:
            return
        names = [name for name in await self._store.list(f"{tenant}/") if _is_requested_checkpoint(name)]
        if len(names) >= self._max_checkpoints:
            raise ToolFailure(
                ErrorCode.NO_SPACE,
                f"tenant '{tenant}' keeps {self._max_checkpoints} checkpoints, which is the limit: delete a checkpoint",
            )


def _build_packing(sandbox: PackingGuest, changes: RootChanges | None, roots: Sequence[str], max_bytes: int) -> Packing:
    if changes is None:
        return Packing(sandbox, pack_roots(roots), max_bytes)
    size = changes.folders + changes.replaced
    return Packing(sandbox, pack_changes(changes, roots), max_bytes, changes.read_packed(), size)


@contextlib.asynccontextmanager
async def _limit_time(verb: str, within_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(within_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise ToolFailure(
            ErrorCode.TIMEOUT,
            f"the session's files were not {verb} within {within_s:g} s: try again, or delete files of the session",
        ) from None


def _is_older(name: str, automatic: float, files: float) -> bool:
    """Return whether `name` is an automatic checkpoint from before the time `automatic`, or an upload or artifact from
    before the time `files`.
    """
    saved_at, stored_at = _parse_automatic_time(name), file_created_at(name.partition("/")[2])
    return (saved_at is not None and saved_at < automatic) or (stored_at is not None and stored_at < files)


def _is_requested_checkpoint(name: str) -> bool:
    return _parse_automatic_time(name) is None and file_created_at(name.partition("/")[2]) is None


def _name(tenant: str, checkpoint: str) -> str:
    if _ID.fullmatch(checkpoint) is None or is_file_id(checkpoint):
        raise _build_missing_error(checkpoint)
    return f"{tenant}/{checkpoint}"


def _build_automatic_id() -> str:
    """Return an id that contains the time of the checkpoint, so that `forget_old` knows the age without reading the
    archive.
    """
    return f"auto-{int(time.time()):08x}-{secrets.token_urlsafe(18)}"


def _parse_automatic_time(name: str) -> float | None:
    """Return when an automatic checkpoint was made, in epoch seconds. Returns None for any other."""
    match = _AUTOMATIC_ID.fullmatch(name.partition("/")[2])
    return float(int(match[1], 16)) if match is not None else None


def _build_missing_error(checkpoint: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.FILE_NOT_FOUND,
        f"no such checkpoint: {checkpoint[:64]!r}; it was deleted, belongs to another tenant, or is stored on another "
        f"host. Hosts share checkpoints only if TOOLCREW_WORKSPACE_STORE names the same store on all of them: "
        f"check the id and that setting",
    )
