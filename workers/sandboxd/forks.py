"""Forks of sessions: new sessions (children) with the files, the shell state and the limits of a session (the parent),
which continues.

Where the runtime can stack disks, a fork copies nothing. The parent's disk is frozen (never written again), and parent
and children continue on empty disks over it. After the caller has its answer, the state that exists only in the
parent's container is packed, and the container is removed. Parent and children get containers at their next calls, as
after an eviction. Otherwise the children begin with an archive of all files. If background jobs continue in the parent,
it must keep its container and disk; the children then share a copy of the disk.

Invariant: no session writes to a disk that another session reads. So the parent's record names its new disk before any
child's record names the old one, and a disk is read only after its last writer has ended (disks/loop_mounts.py). A disk
or an archive is kept as long as a session's record names it. The last session that has it deletes it; otherwise the
next start of sandboxd does.
"""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.background import settle
from toolcrew.workers.sandboxd.disks.base import Workspace
from toolcrew.workers.sandboxd.disks.image import ImageWorkspace, ImageWorkspaces
from toolcrew.workers.sandboxd.factory import SandboxFactory
from toolcrew.workers.sandboxd.plans import with_placeholders
from toolcrew.workers.sandboxd.runtime.attestation import ask_attestation
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import FILES_KEPT, HostSession
from toolcrew.workers.sandboxd.sessions import Sessions

log = structlog.get_logger(__name__)

MERGED_LAYERS = 16
"""Number of layers at which they are merged into one, because a lookup of a missing name searches every layer."""

_STREAMS_S = 1.0
"""Seconds that a fork waits for the report that a stream, such as that of a written file, has ended."""
_MERGES = 2
"""Maximum number of merges of a host at a time, each for another tenant."""


class SessionForker:
    """Forks the sessions of this host."""

    def __init__(self, sessions: Sessions, factory: SandboxFactory) -> None:
        self._sessions = sessions
        self._factory = factory
        self._store = sessions.store
        self._running: set[asyncio.Task[None]] = set()
        self._merging: set[str] = set()
        """Tenants whose layers are being merged, or wait for this: one merge for each."""
        self._merges = asyncio.Semaphore(_MERGES)

    async def fork(self, name: str, children: Sequence[str], *, leaves_jobs: bool) -> HostSession:
        """Create the sessions `children`, which get their sandboxes at their first calls. Return the parent. Without
        `leaves_jobs`, refuse to fork a session with a background job; otherwise the jobs continue in the parent only.

        Raises ToolFailure (SESSION_NOT_FOUND, SESSION_BUSY, NO_SPACE) and SandboxUnavailable. After an error no child
        exists.
        """
        entry = self._sessions.find_open(name)
        self._sessions.check_room(len(children))
        # A worker that disconnects must not stop the fork half-way: only some of the children would then have records.
        await asyncio.shield(self._start(self._fork(entry, children, leaves_jobs=leaves_jobs)))
        depth = len(entry.workspace.layers)
        # After a failed merge, for example on a full disk, wait for some more layers before the next attempt.
        if depth and depth % MERGED_LAYERS == 0 and entry.tenant not in self._merging:
            self._merging.add(entry.tenant)
            merging = self._start(self._merge(entry.workspace.layers, entry))
            merging.add_done_callback(lambda _: self._merging.discard(entry.tenant))
        return entry

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _fork(self, entry: HostSession, children: Sequence[str], *, leaves_jobs: bool) -> None:
        async with entry.lock:
            self._sessions.find_open(entry.id)  # This raises if the session was closed meanwhile.
            entry.used_at = time.monotonic()
            await entry.handed_over()
            can_stack = self._factory.stacks(entry.plan)
            if entry.sandbox is not None or not can_stack:
                await self._sessions.make_ready(entry)
            self._sessions.refuse_lost(entry)
            if entry.sandbox is None:
                self._stack(entry, children)
                return
            entry.is_moving = True  # From here on, calls of the parent wait for its lock.
            try:
                await self._fork_running(entry, entry.sandbox, children, leaves_jobs=leaves_jobs, can_stack=can_stack)
            finally:
                entry.is_moving = False

    async def _merge(self, layers: tuple[str, ...], entry: HostSession) -> None:
        """Replace several frozen workspaces by one with the same content, in every session that has all of them as
        layers. A running sandbox keeps the old ones until it ends.
        """
        workspaces, size = self._factory.workspaces, entry.workspace.size
        assert isinstance(workspaces, ImageWorkspaces)
        async with self._merges:
            name = secrets.token_hex(12)
            try:
                await workspaces.merge(name, layers, size, tenant=entry.tenant)
            except SandboxUnavailable as error:
                log.warning("layers_not_merged", layers=len(layers), error=str(error))
                return
            # Other sessions never get these layers, and their locks may be held for minutes.
            for session in [session for session in self._sessions.all() if _has_layers(session, layers)]:
                async with session.lock:  # While the lock is held, no sandbox of the session starts.
                    workspace = session.workspace
                    if not isinstance(workspace, ImageWorkspace) or not _has_layers(session, layers):
                        continue
                    # The session was closed while this task waited for the lock. Its record must not be written again.
                    if self._sessions.find(session.id) is not session:
                        continue
                    session.workspace = replace(workspace, layers=(*workspace.layers[: -len(layers)], name))
                    try:
                        self._sessions.suspender.keep(session)
                    except SandboxUnavailable as error:
                        session.workspace = workspace
                        log.warning("layers_not_merged", layers=len(layers), error=str(error))
            # Delete the old layers that no session names any more. If no session could use the new workspace, it is
            # deleted too.
            await self._sessions.discard_layers((name, *layers), size)

    async def _fork_running(
        self, entry: HostSession, sandbox: Sandbox, children: Sequence[str], *, leaves_jobs: bool, can_stack: bool
    ) -> None:
        await _wait_for_streams(entry)
        if entry.is_busy or entry.is_streaming:
            raise _busy("a call, a checkpoint or a stream of the session is running: fork it between them")
        # Ask the guest now: a job may have ended, or may have begun in a call whose answer was lost.
        has_jobs = (await ask_attestation(sandbox)).jobs > 0
        if has_jobs and not leaves_jobs:
            raise _busy(
                "a background job or a process of a stream runs in the session: end it, or leave the jobs in the parent"
            )
        if has_jobs or not can_stack:
            await self._copy(entry, sandbox, children, can_stack=can_stack)
            return
        entry.activity.end_jobs()
        try:
            self._stack(entry, children)
        finally:
            # Do this also after an error: the parent may have its new disk, so its old container, which writes to the
            # frozen disk, must end.
            if entry.sandbox is None:
                heirs = [heir for name in (entry.id, *children) if (heir := self._sessions.find(name)) is not None]
                handover = self._start(self._hand_over(sandbox, entry, heirs))
                for heir in heirs:
                    heir.handover = handover

    async def _hand_over(self, sandbox: Sandbox, entry: HostSession, heirs: Sequence[HostSession]) -> None:
        """Pack the state of the parent's container for all `heirs` (the parent and the children), and remove the
        container.
        """
        try:
            archive = await self._store.pack(entry, sandbox)
        except SandboxUnavailable as error:
            # The files of all heirs are safe on the frozen disk. /output is lost, and the next call of each heir
            # reports this.
            log.error("fork_not_packed", container=sandbox.container[:12], error=str(error))
            for heir in heirs:
                heir.lost = str(error)
                heir.add_news(FILES_KEPT.format(error))
        else:
            for heir in heirs:
                heir.archive = archive
                if self._sessions.find(heir.id) is heir:
                    self._sessions.suspender.try_keep(heir)
            await self._sessions.forget_archive(entry, archive)  # All heirs may have been closed meanwhile.
        await settle([self._factory.discard(sandbox)])

    def _stack(self, entry: HostSession, children: Sequence[str]) -> None:
        """Give the parent and each child an empty disk over the parent's disk. There is no await, so no other task sees
        an intermediate state.
        """
        before = entry.workspace, entry.sandbox
        unused = list[Workspace]()
        try:
            for _ in (entry.id, *children):
                unused.append(self._factory.stack_workspace(entry.workspace))
            entry.workspace, entry.sandbox = unused[0], None
            try:
                self._sessions.suspender.keep(entry)
            except SandboxUnavailable:
                entry.workspace, entry.sandbox = before
                raise
            # A workspace that was never mounted has no files and becomes no layer.
            unused[0] = before[0]
            if before[0].name in entry.workspace.layers:
                unused.pop(0)
            new = unused[-len(children) :]
            self._sessions.add_all(
                [self._build_child(entry, *child, entry.archive) for child in zip(children, new, strict=True)]
            )
            del unused[-len(children) :]
        finally:
            for workspace in unused:
                self._start(self._factory.discard_workspace(workspace))

    async def _copy(self, entry: HostSession, sandbox: Sandbox, children: Sequence[str], *, can_stack: bool) -> None:
        """Fork without changing the parent. The children share a copy of its disk; where this is not possible, each
        child unpacks an archive of all files at its first call.
        """
        archive, workspaces = await self._store.pack(entry, sandbox, is_whole=not can_stack), list[Workspace]()
        copied: ImageWorkspace | None = None
        try:
            if can_stack:
                copied = await self._copy_disk(entry, sandbox)
            for _ in children:
                workspace = await self._factory.make_workspace(entry.plan) if copied is None else None
                workspaces.append(workspace or self._factory.stack_workspace(copied or entry.workspace))
            entries = [self._build_child(entry, *child, archive) for child in zip(children, workspaces, strict=True)]
            for child in entries:
                child.is_unfilled = copied is None and child.workspace.outlives_container
            self._sessions.add_all(entries)
        except BaseException:
            for workspace in (*workspaces, copied):
                if workspace is not None:
                    await self._factory.discard_workspace(workspace)
            await self._store.forget(entry.tenant, archive)
            raise

    async def _copy_disk(self, entry: HostSession, sandbox: Sandbox) -> ImageWorkspace:
        workspaces, workspace = self._factory.workspaces, entry.workspace
        assert isinstance(workspaces, ImageWorkspaces)
        assert isinstance(workspace, ImageWorkspace)
        # Pause the sandbox during the copy, so that the copy is consistent: jobs of the parent may write at any time.
        await sandbox.pause()
        try:
            return await workspaces.copy(secrets.token_hex(12), workspace)
        finally:
            await sandbox.unpause()

    def _build_child(self, entry: HostSession, name: str, workspace: Workspace, archive: str | None) -> HostSession:
        # Give each child new placeholders of secrets: the proxy would not replace those of the parent in requests of a
        # child.
        plan = with_placeholders(entry.plan, name)
        child = HostSession(name, plan, entry.ttl_s, workspace, None, generation=0, policy=entry.policy)
        child.archive, child.lost, child.news = archive, entry.lost, entry.news
        # No checkpoint has the child's files yet.
        child.activity.has_written = True
        return child


def _has_layers(session: HostSession, layers: tuple[str, ...]) -> bool:
    workspace = session.workspace
    return isinstance(workspace, ImageWorkspace) and workspace.layers[-len(layers) :] == layers


async def _wait_for_streams(entry: HostSession) -> None:
    if entry.is_streaming and entry.sandbox is not None and entry.sandbox.streams is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STREAMS_S):
                await entry.sandbox.streams.wait_quiet()


def _busy(message: str) -> ToolFailure:
    return ToolFailure(ErrorCode.SESSION_BUSY, message)
