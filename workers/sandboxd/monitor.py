"""The periodic duties of sandboxd: close expired sessions, freeze and evict idle ones, enforce soft quotas and free
disk space, remove leftovers.

Invariant: a duty for idle sessions never touches a session in use. A session with a running call has an idle time of 0,
and every duty checks the idle time again after each wait. A sandbox in use is ended only when its workspace is too
large or the disk is full, because this endangers the other sessions of the host.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.background import settle
from toolcrew.workers.sandboxd.budgets import FairBudget
from toolcrew.workers.sandboxd.factory import SandboxFactory
from toolcrew.workers.sandboxd.reaper import Reaper
from toolcrew.workers.sandboxd.session import HostSession, bound_to_session
from toolcrew.workers.sandboxd.sessions import Sessions

log = structlog.get_logger(__name__)

EXPIRE_EVERY_S = 5.0
IDLE_EVERY_S = 1.0
QUOTA_EVERY_S = 2.0
DISK_EVERY_S = 0.5
SWEEP_EVERY_S = 30.0
TIDY_EVERY_S = 3600.0
_EVICTED_AT_ONCE = 8
_OVERFULL_GROWTH = 1.1
"""After a sandbox was ended for a workspace that is too large, it is ended again only when the workspace has grown by
this factor, so that the session can delete files.
"""


class DiskMonitor:
    """Monitor of the free space of a disk. Below `stop_bytes` no sandbox may write. Writing resumes only at 1.25
    times `stop_bytes`; otherwise sandboxes would be ended and started in quick alternation.
    """

    def __init__(self, folder: Path, stop_bytes: int) -> None:
        self._folder = folder
        self._stop_bytes = stop_bytes
        self._is_short = False

    def find_shortage(self) -> str | None:
        """Return a message for the operator about the shortage; None if there is enough space."""
        status = os.statvfs(self._folder)
        free = status.f_bavail * status.f_frsize
        self._is_short = free < self._stop_bytes * (1.25 if self._is_short else 1.0)
        if not self._is_short:
            return None
        return (
            f"the disk under the workspaces has only {free} bytes free: make room on this host, or move "
            "TOOLCREW_SANDBOXD_STATE to a larger one"
        )


@dataclass(frozen=True)
class IdleTimes:
    """Seconds without a call after which a session is frozen, and after which its container is evicted."""

    pause_s: float
    evict_s: float


class SessionMonitor:
    """Runs the periodic duties until it is cancelled. A failed round is logged, and the next round tries again."""

    def __init__(
        self,
        sessions: Sessions,
        factory: SandboxFactory,
        reaper: Reaper,
        idle: IdleTimes,
        disk: DiskMonitor | None = None,
        tidy: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Create the monitor. `disk`: the disk of the workspaces; None when the workspaces are in the containers'
        memory. `tidy`: deletes old checkpoints and returns their number.
        """
        self._tidy_store = tidy
        self._sessions = sessions
        self._disk = disk
        self._factory = factory
        self._reaper = reaper
        self._idle = idle

    async def run(self) -> None:
        """Run all rounds concurrently until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_every(EXPIRE_EVERY_S, self.expire))
            tasks.create_task(_every(min(IDLE_EVERY_S, self._idle.pause_s), self.freeze_idle))
            tasks.create_task(_every(min(IDLE_EVERY_S, self._idle.evict_s), self.evict_idle))
            tasks.create_task(_every(SWEEP_EVERY_S, self._sweep))
            if self._tidy_store is not None:
                tasks.create_task(_every(TIDY_EVERY_S, self.tidy))
            if self._disk is not None:
                tasks.create_task(_every(DISK_EVERY_S, self.watch_disk))
            if not self._factory.workspaces.is_hard:
                tasks.create_task(_every(QUOTA_EVERY_S, self.end_overfull))

    async def expire(self) -> None:
        """Close sessions that had no call for their time to live, and retry failed removals."""
        await settle(self._end(entry) for entry in self._sessions.all() if not entry.lock.locked())
        await self._factory.retry_removals()

    async def _end(self, entry: HostSession) -> None:
        """Close a session that has expired or whose earlier close failed; remove a lost sandbox. The caller skips
        sessions whose lock another task holds.
        """
        with bound_to_session(entry.id):
            await self._end_bound(entry)

    async def _end_bound(self, entry: HostSession) -> None:
        # No await lies between the check and the mark: a call cannot begin after the check, because `is_closing`
        # refuses it.
        if not entry.is_closing and entry.idle_s() > entry.ttl_s:
            log.info("session_expired", ttl_s=entry.ttl_s)
            entry.is_closing = True
        if entry.is_closing:
            await self._sessions.close(entry.id)
        elif entry.sandbox is not None and entry.sandbox.lost is not None and not entry.sandbox.is_removed:
            await entry.sandbox.remove()

    async def freeze_idle(self) -> None:
        """Freeze idle sessions. This is a separate round, so that it does not wait for evictions, which take long."""
        await settle(self._sessions.suspender.pause(entry) for entry in self._find_idle(self._idle.pause_s))

    async def evict_idle(self) -> None:
        """Evict sessions that have been idle for a long time, a few at once."""
        places = FairBudget(_EVICTED_AT_ONCE)
        await settle(self._evict(entry, places) for entry in self._find_idle(self._idle.evict_s))

    async def _evict(self, entry: HostSession, places: FairBudget) -> None:
        async with places.hold(entry.tenant, 1):
            # The session may have been used while this task waited for a slot.
            if entry.may_evict and entry.idle_s() >= self._idle.evict_s:
                with bound_to_session(entry.id):
                    await self._sessions.suspender.give_up(entry)

    def _find_idle(self, idle_s: float) -> list[HostSession]:
        """Return the sessions that have a container and were idle for `idle_s` seconds. A session with a background
        job is checked again only after the time for freezing.
        """
        checked_before = time.monotonic() - self._idle.pause_s
        candidates = [entry for entry in self._sessions.all() if entry.sandbox is not None and not entry.is_closing]
        return [entry for entry in candidates if entry.idle_s() >= idle_s and entry.checked_at <= checked_before]

    async def end_overfull(self) -> None:
        """End the sandboxes whose workspaces are too large. Needed only if the kernel does not enforce the size."""
        overfull = await self._factory.workspaces.find_overfull()
        for entry in self._sessions.all():
            counted_bytes = overfull.get(entry.workspace.name, 0)
            if counted_bytes > entry.overfull_bytes * _OVERFULL_GROWTH:
                self._end_overfull(entry, counted_bytes)
            if not counted_bytes:
                entry.overfull_bytes = 0

    def _end_overfull(self, entry: HostSession, counted_bytes: int) -> None:
        entry.overfull_bytes = counted_bytes
        if entry.sandbox is not None:
            size = entry.workspace.size
            entry.sandbox.end(
                f"its workspace had {counted_bytes} bytes, and the limits are {size.bytes} bytes and {size.inodes} "
                "files: delete files"
            )

    async def watch_disk(self) -> None:
        """End the sandboxes that can write when the host's disk is nearly full. No sandbox starts until there is
        space again.
        """
        assert self._disk is not None
        shortage = self._disk.find_shortage()
        if shortage is not None and self._factory.shortage is None:
            log.error("host_disk_short", reason=shortage)
        # Tell the factory about the shortage before the sandboxes end, so that no session starts a new one meanwhile.
        self._factory.shortage = shortage
        for entry in self._sessions.all() if shortage is not None else []:
            # Skip frozen sandboxes, which cannot write. A sandbox that thaws during the shortage is ended in the next
            # round.
            if entry.sandbox is not None and entry.sandbox.lost is None and not entry.is_paused:
                entry.sandbox.end(shortage or "")

    async def tidy(self) -> None:
        """Delete automatic checkpoints above their maximum age."""
        assert self._tidy_store is not None
        try:
            log.info("old_checkpoints_deleted", count=await self._tidy_store())
        except SandboxUnavailable as error:
            log.warning("old_checkpoints_not_deleted", error=str(error))

    async def _sweep(self) -> None:
        await settle([self._reaper.sweep()])


async def _every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:  # outermost handler: a bug in one round must not end the others
            log.exception("cleanup_failed")
