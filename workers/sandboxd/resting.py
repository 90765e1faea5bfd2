"""Sessions at rest: frozen, given up with what their containers alone have, and what of that comes back."""

import asyncio
import time

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.attestation import ask_attestation
from workers.sandboxd.making import Maker
from workers.sandboxd.parking import Parking
from workers.sandboxd.records import Records
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.session import FILES_LOST, KEPT, Session

log = structlog.get_logger(__name__)

MIN_IDLE_S = 1.0
"""A session that has worked a moment ago keeps its container when others want a place."""
_MOST_UNPACKS = 3
"""A parcel that could not be unpacked so many times will not be the next time either."""
_JOBS_ENDED = (
    "sandboxd was stopped and started again: background jobs have ended; files, kept outputs and the shell's folder and variables are kept"
)


class Resting:
    """Freezes sessions, packs them and removes their containers. Each holds the session's lock meanwhile, so that calls wait."""

    def __init__(self, maker: Maker, parking: Parking, records: Records) -> None:
        self._maker = maker
        self._parking = parking
        self._records = records

    async def pause(self, entry: Session) -> bool:
        """Freeze an idle session; its next call thaws it. False when it works after all, or has a background job."""
        if not entry.is_ready or entry.is_busy or entry.lock.locked():
            return False
        async with entry.lock:
            sandbox, used_at = entry.sandbox, entry.used_at
            if sandbox is None or not entry.is_ready or await self._has_jobs(entry, sandbox):
                return False
            if not entry.is_ready or entry.is_busy or entry.used_at != used_at:
                return False
            # From before the engine is asked, whatever comes of it: to thaw one that runs is fine, to ask a frozen one is its end.
            entry.is_paused = True
            freezing = asyncio.ensure_future(self._maker.engine.pause(sandbox.container))
            try:
                await asyncio.shield(freezing)
            except asyncio.CancelledError:
                await asyncio.wait({freezing})
                raise
        return True

    async def give_up(self, entry: Session, *, must_be_idle: bool = True) -> bool:
        """Pack what the container alone has and remove it. False when the session works, has a background job, or could not be packed."""
        if entry.sandbox is None or entry.lock.locked() or (must_be_idle and entry.idle_s() < MIN_IDLE_S):
            return False
        async with entry.lock:
            return await self._pack_and_remove(entry)

    async def suspend(self, entry: Session) -> None:
        """Give a session up because sandboxd is ending: background jobs end with it. One that works is left."""
        async with entry.lock:
            await self._pack_and_remove(entry, is_last=True)

    async def unpack(self, entry: Session, sandbox: Sandbox) -> None:
        """Into its new sandbox what was packed of the last one. Raises SandboxUnavailable; after a few times the parcel counts as lost."""
        try:
            await self._parking.unpack(entry, sandbox)
        except SandboxUnavailable as error:
            log.error("parcel_not_unpacked", container=sandbox.container[:12], error=str(error))
            entry.failed_unpacks += 1
            if entry.failed_unpacks >= _MOST_UNPACKS:
                entry.lost = f"what was packed of it cannot be unpacked: {error}"
                if entry.workspace.outlives_container:
                    entry.add_news(KEPT.format(entry.lost))
                else:
                    entry.untold = FILES_LOST.format(f"the sandbox of this session cannot be had again ({entry.lost})")
            raise
        entry.failed_unpacks = 0

    def keep(self, entry: Session) -> None:
        """Record it for the next sandboxd, or that there is nothing to keep. Raises SandboxUnavailable."""
        if self.is_kept(entry):
            self._records.keep_session(entry.record())
        else:
            self._records.forget_session(entry.id)

    def try_keep(self, entry: Session) -> None:
        """As `keep`; when the disk does not take it the next sandboxd finds what was recorded before."""
        try:
            self.keep(entry)
        except SandboxUnavailable as error:
            log.error("session_not_recorded", workspace=entry.workspace.name, error=str(error))

    def is_kept(self, entry: Session) -> bool:
        """Whether its files would be there without this process: as a workspace, or as a parcel."""
        return entry.workspace.outlives_container or (entry.sandbox is None and entry.parcel is not None)

    async def forget_parcel(self, entry: Session, parcel: str | None) -> None:
        """Delete it; what would not go the next start finds."""
        try:
            if parcel is not None:
                await self._parking.forget(entry.tenant, parcel)
        except SandboxUnavailable as error:
            log.error("parcel_not_removed", error=str(error))

    async def _pack_and_remove(self, entry: Session, *, is_last: bool = False) -> bool:
        """`is_last`: sandboxd is ending, and background jobs with it."""
        sandbox = entry.sandbox
        if sandbox is None or sandbox.lost is not None or entry.is_busy or entry.is_closing:
            return False
        entry.is_moving = True
        try:
            if entry.is_paused:
                await self._maker.engine.unpause(sandbox.container)
                entry.is_paused = False
            has_jobs = await self._has_jobs(entry, sandbox)
            if has_jobs and not is_last:
                return False
            entry.parcel = await self._parking.pack(entry, sandbox)
            if has_jobs:
                entry.add_news(_JOBS_ENDED)
            entry.sandbox = None
            await self._let_go(entry, sandbox)
        except SandboxUnavailable as error:
            log.warning("session_not_given_up", container=sandbox.container[:12], error=str(error))
        finally:
            entry.is_moving = False
        return entry.sandbox is None

    async def _let_go(self, entry: Session, sandbox: Sandbox) -> None:
        """Record that it is packed, and remove the container; without a record it stays."""
        try:
            self.keep(entry)
        except SandboxUnavailable:
            parcel, entry.parcel, entry.sandbox = entry.parcel, None, sandbox
            await self.forget_parcel(entry, parcel)
            raise
        await self._maker.discard(sandbox)

    async def _has_jobs(self, entry: Session, sandbox: Sandbox) -> bool:
        entry.looked_at = time.monotonic()
        jobs = (await ask_attestation(sandbox)).jobs
        entry.traces.note_jobs(jobs)
        return jobs > 0
