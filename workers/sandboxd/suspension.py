"""Sessions without a running container: frozen, evicted (their container's state is packed, and the container is
removed), and taken over from an earlier sandboxd.

The state of a session must exist in at least one place at every moment. So the archive and the session's record are
written before the container is removed. If sandboxd dies in between, the next one finds the record, and the reaper
removes the container.
"""

import asyncio
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import structlog

from toolcrew.archives.choice import open_own_store
from toolcrew.contract.errors import SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.archives.checkpoints import Checkpoints
from toolcrew.workers.sandboxd.archives.packing import count_max_bytes, find_roots
from toolcrew.workers.sandboxd.budgets import MemoryBudget
from toolcrew.workers.sandboxd.disks.base import Workspaces, WorkspaceSize
from toolcrew.workers.sandboxd.factory import SandboxFactory
from toolcrew.workers.sandboxd.records import Records, SessionRecord
from toolcrew.workers.sandboxd.runtime.attestation import ask_attestation
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import FILES_KEPT, FILES_LOST, HostSession

log = structlog.get_logger(__name__)

PACKING_S = 60.0
"""Time limit for packing, in seconds. Another session may wait for the slot. Unpacking has a longer limit."""
_CONTAINERS_OWN = ("/output",)  # a path of the sandbox, not of this host
MIN_IDLE_S = 1.0
"""A session that was idle for fewer seconds keeps its container, even if another session needs the slot."""
_MAX_UNPACKS = 3
"""Number of failures after which an archive counts as lost."""
_JOBS_ENDED = (
    "sandboxd was stopped and started again: background jobs have ended, and so have processes of streams; files, kept "
    "outputs and the shell's folder and variables are kept"
)


class SuspensionStore:
    """Archives of evicted containers, in a store of this host. An archive contains long outputs and the shell's
    state, and the folders of the session if they do not outlive its container.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    async def pack(self, session: HostSession, sandbox: Sandbox, *, is_whole: bool = False) -> str:
        """Pack the state of a session's container and return the id of the new archive. `is_whole`: include the
        workspace even if it outlives the container.
        """
        most = count_max_bytes(session.plan.workspace_bytes, session.plan.workspace_inodes)
        with _as_unavailable("packed"):
            saved = await self._checkpoints.save(
                session.tenant, sandbox, roots=_roots(session, is_whole=is_whole), max_bytes=most
            )
            return saved.id

    async def unpack(self, session: HostSession, sandbox: Sandbox) -> None:
        if session.archive is not None:
            with _as_unavailable("unpacked"):
                await self._checkpoints.load(session.tenant, session.archive, sandbox)

    async def forget(self, tenant: str, archive: str) -> None:
        await self._checkpoints.forget(tenant, archive)

    async def forget_all_but(self, kept_ids: Set[tuple[str, str]]) -> int:
        return await self._checkpoints.forget_all_but(kept_ids)


def open_suspension_store(folder: Path, free_bytes: int, memory: MemoryBudget | None = None) -> SuspensionStore:
    """Return a store in a folder that only this process uses. `free_bytes`: as in `FolderStore`. `memory`: the budget
    of all archives.
    """
    return SuspensionStore(Checkpoints(open_own_store(folder, free_bytes), save_s=PACKING_S, memory=memory))


def _roots(session: HostSession, *, is_whole: bool) -> tuple[str, ...]:
    if session.workspace.outlives_container and not session.is_unfilled and not is_whole:
        return _CONTAINERS_OWN
    return find_roots(is_root=session.plan.is_root)


@contextmanager
def _as_unavailable(verb: str) -> Iterator[None]:
    """Convert a ToolFailure of the block to SandboxUnavailable: no call caused the work, so no model reads the
    failure.
    """
    try:
        yield
    except ToolFailure as failure:
        raise SandboxUnavailable(
            f"the session's state could not be {verb}: {failure}; open a new session if it repeats"
        ) from failure


class SessionSuspender:
    """Freezes sessions, packs them and removes their containers. The suspender holds the session's lock for that
    time, so that calls wait.
    """

    def __init__(self, factory: SandboxFactory, suspension_store: SuspensionStore, records: Records) -> None:
        self._factory = factory
        self._store = suspension_store
        self._records = records

    async def pause(self, entry: HostSession) -> bool:
        """Freeze an idle session; its next call thaws it. Returns False when the session is busy or has a background
        job.
        """
        if not entry.is_ready or entry.is_busy or entry.lock.locked():
            return False
        async with entry.lock:
            sandbox, used_at = entry.sandbox, entry.used_at
            if sandbox is None or not entry.is_ready or await self._has_jobs(entry, sandbox):
                return False
            # Check all conditions again, because a call may have begun while the guest was asked.
            if not entry.is_ready or entry.is_busy or entry.used_at != used_at:
                return False
            # Set the flag before the engine call, which may fail after it took effect. To thaw a running container is
            # harmless; a request to a frozen container would reach its time limit and end the container.
            entry.is_paused = True
            freezing = asyncio.ensure_future(sandbox.pause())
            try:
                await asyncio.shield(freezing)
            except asyncio.CancelledError:
                # Wait for the engine even after a cancellation: it must not freeze the container after this task has
                # released the lock.
                await asyncio.wait({freezing})
                raise
        return True

    async def give_up(self, entry: HostSession, *, must_be_idle: bool = True) -> bool:
        """Pack the container's own state and remove it. Returns False when the session is busy, has a background job,
        or cannot be packed.
        """
        if entry.sandbox is None or entry.lock.locked() or (must_be_idle and entry.idle_s() < MIN_IDLE_S):
            return False
        async with entry.lock:
            return await self._pack_and_remove(entry)

    async def suspend(self, entry: HostSession) -> None:
        """Evict a session because sandboxd is shutting down; its background jobs end. A busy session is left alone."""
        async with entry.lock:
            await self._pack_and_remove(entry, is_last=True)

    async def unpack(self, entry: HostSession, sandbox: Sandbox) -> None:
        """Unpack the archive into the session's new sandbox. Raises SandboxUnavailable. After a few failures the
        archive counts as lost.
        """
        try:
            await self._store.unpack(entry, sandbox)
        except SandboxUnavailable as error:
            log.error("archive_not_unpacked", container=sandbox.container[:12], error=str(error))
            entry.failed_unpacks += 1
            if entry.failed_unpacks >= _MAX_UNPACKS:
                entry.lost = f"its stored archive cannot be unpacked: {error}"
                if entry.workspace.outlives_container and not entry.is_unfilled:
                    entry.add_news(FILES_KEPT.format(entry.lost))
                else:
                    entry.unreported_loss = FILES_LOST.format(
                        f"the sandbox of this session cannot be restored ({entry.lost})"
                    )
            raise
        entry.failed_unpacks = 0

    def keep(self, entry: HostSession) -> None:
        """Save the session's record for the next sandboxd, or delete it when nothing is kept. Raises
        SandboxUnavailable.
        """
        if self.is_kept(entry):
            self._records.keep_session(entry.record())
        else:
            self._records.forget_session(entry.id)

    def try_keep(self, entry: HostSession) -> None:
        """Do the same as `keep`, but only log a failure. The next sandboxd then finds the earlier record."""
        try:
            self.keep(entry)
        except SandboxUnavailable as error:
            log.error("session_not_recorded", workspace=entry.workspace.name, error=str(error))

    def is_kept(self, entry: HostSession) -> bool:
        """Return whether the files exist without this process, as a workspace or as an archive."""
        return entry.workspace.outlives_container or (entry.sandbox is None and entry.archive is not None)

    async def forget_archive(self, entry: HostSession, archive: str | None) -> None:
        """Delete an archive. The next start repeats a failed deletion."""
        try:
            if archive is not None:
                await self._store.forget(entry.tenant, archive)
        except SandboxUnavailable as error:
            log.error("archive_not_removed", error=str(error))

    async def _pack_and_remove(self, entry: HostSession, *, is_last: bool = False) -> bool:
        """Pack and remove the container. `is_last`: sandboxd is shutting down, so background jobs may be ended."""
        sandbox = entry.sandbox
        if sandbox is None or sandbox.lost is not None or entry.is_busy or entry.is_closing:
            return False
        if entry.is_streaming and not is_last:
            return False
        entry.is_moving = True
        try:
            if entry.is_paused:
                await sandbox.unpause()
                entry.is_paused = False
            has_jobs = await self._has_jobs(entry, sandbox)
            if has_jobs and not is_last:
                return False
            # Do not change the container until the archive and the record are written.
            entry.archive = await self._store.pack(entry, sandbox)
            if has_jobs:
                entry.add_news(_JOBS_ENDED)
            entry.sandbox, entry.failed_packs = None, 0
            await self._remove_packed(entry, sandbox)
        except SandboxUnavailable as error:
            entry.failed_packs += 1
            log.warning("session_not_evicted", container=sandbox.container[:12], error=str(error))
        finally:
            entry.is_moving = False
        return entry.sandbox is None

    async def _remove_packed(self, entry: HostSession, sandbox: Sandbox) -> None:
        """Save a record that names the archive, then remove the container. If the record cannot be saved, keep the
        container.
        """
        try:
            self.keep(entry)
        except SandboxUnavailable:
            # Without the record the next sandboxd would not find the archive, so the container stays the only copy.
            archive, entry.archive, entry.sandbox = entry.archive, None, sandbox
            await self.forget_archive(entry, archive)
            raise
        await self._factory.discard(sandbox)

    async def _has_jobs(self, entry: HostSession, sandbox: Sandbox) -> bool:
        entry.checked_at = time.monotonic()
        jobs = (await ask_attestation(sandbox)).jobs
        entry.activity.record_jobs(jobs)
        return jobs > 0


def adopt(records: Records, workspaces: Workspaces) -> list[HostSession]:
    """Take over the sessions that an earlier sandboxd kept, without containers. Delete a session whose files are
    missing. Skip a session with another kind of workspace; it stays recorded for a sandboxd that uses this kind.
    """
    return [entry for record in records.sessions() if (entry := _adopt(record, records, workspaces)) is not None]


def _adopt(record: SessionRecord, records: Records, workspaces: Workspaces) -> HostSession | None:
    if record.kind != workspaces.kind:
        # Skip the session: an empty workspace of the present kind must not replace the kept one.
        log.error(
            "session_of_another_kind", recorded_kind=record.kind, kind=workspaces.kind, workspace=record.workspace
        )
        return None
    workspace = workspaces.find(
        record.workspace, WorkspaceSize(record.plan.workspace_bytes, record.plan.workspace_inodes), record.layers
    )
    if workspace is None:
        log.error("workspace_missing", workspace=record.workspace)
        records.forget_session(record.id)
        return None
    entry = HostSession(record.id, record.plan, record.ttl_s, workspace, None, record.generation, record.policy)
    entry.archive, entry.news, entry.unreported_loss = record.archive, record.news, record.unreported_loss
    entry.fence, entry.automatic_at, entry.is_unfilled = record.fence, record.automatic_at, record.unfilled
    # Assume changed files: what changed between the record and the end of that sandboxd is unknown.
    entry.activity.has_written = record.changed or record.archive is None
    if record.archive is not None:
        entry.used_at -= max(0.0, time.time() - record.used_at)
    else:  # The idle time starts again, because the time of the last use before the kill is unknown.
        entry.lost = "sandboxd was restarted"
        entry.add_news(FILES_KEPT.format(entry.lost))
    return entry
