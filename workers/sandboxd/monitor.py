"""The periodic duties of sandboxd: expires, freezes and evicts idle sessions, watches soft quotas and the disk, removes
leftovers.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from contract.errors import SandboxUnavailable
from workers.logs import bound_to_session
from workers.sandboxd.background import settle
from workers.sandboxd.factory import SandboxFactory
from workers.sandboxd.reaper import Reaper
from workers.sandboxd.session import Session
from workers.sandboxd.sessions import Sessions

log = structlog.get_logger(__name__)

EXPIRE_EVERY_S = 5.0
IDLE_EVERY_S = 1.0
QUOTA_EVERY_S = 2.0
DISK_EVERY_S = 0.5
SWEEP_EVERY_S = 30.0
TIDY_EVERY_S = 3600.0
_EVICTED_AT_ONCE = 4
_OVERFULL_GROWTH = 1.1
"""How much more a workspace that was found overfull may hold before its sandbox ends again: room to delete
something.
"""


class DiskMonitor:
    """`stop_bytes`: with less free than this nothing may write. It goes on only with a quarter more, so that nobody is
    ended in turns.
    """

    def __init__(self, folder: Path, stop_bytes: int) -> None:
        self._folder = folder
        self._stop_bytes = stop_bytes
        self._is_short = False

    def find_shortage(self) -> str | None:
        """What is short, as a sentence for the operator; None: there is room."""
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
    """Seconds without a call after which a session is frozen, and after which its container is given up."""

    pause_s: float
    evict_s: float


class SessionMonitor:
    """Runs until it is cancelled. A round that fails is logged, and the next one tried."""

    def __init__(
        self,
        sessions: Sessions,
        factory: SandboxFactory,
        reaper: Reaper,
        idle: IdleTimes,
        disk: DiskMonitor | None = None,
        tidy: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`disk`: where workspaces lie, when that is not the containers' own memory. `tidy`: the store of checkpoints;
        gives how many went.
        """
        self._tidy_store = tidy
        self._sessions = sessions
        self._disk = disk
        self._factory = factory
        self._reaper = reaper
        self._idle = idle

    async def keep(self) -> None:
        """All rounds side by side, for ever."""
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
        """Close sessions that no call has used for their time to live, and try again to remove what would not go."""
        await settle(self._end(entry) for entry in self._sessions.all() if not entry.lock.locked())
        await self._factory.retry_removals()

    async def _end(self, entry: Session) -> None:
        """What is due of a session that nobody rebuilds, gives up or closes just now."""
        with bound_to_session(entry.id):
            await self._end_bound(entry)

    async def _end_bound(self, entry: Session) -> None:
        if not entry.is_closing and entry.idle_s() > entry.ttl_s:
            log.info("session_expired", ttl_s=entry.ttl_s)
            entry.is_closing = True
        if entry.is_closing:
            await self._sessions.close(entry.id)
        elif entry.sandbox is not None and entry.sandbox.lost is not None and not entry.sandbox.is_removed:
            await entry.sandbox.remove()

    async def freeze_idle(self) -> None:
        """Freeze what has been idle for a while: a round of its own, packing another takes long."""
        await settle(self._sessions.suspender.pause(entry) for entry in self._find_idle(self._idle.pause_s))

    async def evict_idle(self) -> None:
        """Give up what has been idle for long, a few at a time."""
        slots = asyncio.Semaphore(_EVICTED_AT_ONCE)
        await settle(self._evict(entry, slots) for entry in self._find_idle(self._idle.evict_s))

    async def _evict(self, entry: Session, slots: asyncio.Semaphore) -> None:
        async with slots:
            if entry.idle_s() >= self._idle.evict_s:
                with bound_to_session(entry.id):
                    await self._sessions.suspender.give_up(entry)

    def _find_idle(self, idle_s: float) -> list[Session]:
        """Those that have a container and nothing to do. One that had a background job is asked again only after the
        time of freezing.
        """
        asked_before = time.monotonic() - self._idle.pause_s
        candidates = [entry for entry in self._sessions.all() if entry.sandbox is not None and not entry.is_closing]
        return [entry for entry in candidates if entry.idle_s() >= idle_s and entry.checked_at <= asked_before]

    async def end_overfull(self) -> None:
        """End the sandboxes whose workspaces hold more than they may, where the kernel does not see to it."""
        found = await self._factory.workspaces.find_overfull()
        for entry in self._sessions.all():
            held = found.get(entry.workspace.name, 0)
            if held > entry.overfull_bytes * _OVERFULL_GROWTH:
                self._end_overfull(entry, held)
            if not held:
                entry.overfull_bytes = 0

    def _end_overfull(self, entry: Session, held: int) -> None:
        entry.overfull_bytes = held
        if entry.sandbox is not None:
            size = entry.workspace.size
            entry.sandbox.end(
                f"its workspace held {held} bytes, and {size.bytes} bytes in {size.inodes} files is the most: delete "
                "files"
            )

    async def watch_disk(self) -> None:
        """End what writes when the host's disk is nearly full, and start nothing until there is room again."""
        assert self._disk is not None
        shortage = self._disk.find_shortage()
        if shortage is not None and self._factory.shortage is None:
            log.error("host_disk_short", why=shortage)
        self._factory.shortage = shortage
        for entry in self._sessions.all() if shortage is not None else []:
            if entry.sandbox is not None and entry.sandbox.lost is None and not entry.is_paused:
                entry.sandbox.end(shortage or "")

    async def tidy(self) -> None:
        """Delete automatic checkpoints that no session has replaced for long."""
        assert self._tidy_store is not None
        try:
            log.info("old_checkpoints_deleted", count=await self._tidy_store())
        except SandboxUnavailable as error:
            log.warning("store_not_tidied", error=str(error))

    async def _sweep(self) -> None:
        await settle([self._reaper.sweep()])


async def _every(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:  # the edge of a round: a bug in one must not end the others, and is loud
            log.exception("round_failed")
