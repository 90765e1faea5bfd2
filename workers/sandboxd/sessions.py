"""Which session has which sandbox: opening, making ready for a call, rebuilding after a loss, giving up, closing."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from workers.sandboxd.attestation import parse_attestation
from workers.sandboxd.classes import SandboxPlan
from workers.sandboxd.making import Maker
from workers.sandboxd.parking import Parking
from workers.sandboxd.pool import WarmPool
from workers.sandboxd.records import Records
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.session import Session
from workers.sandboxd.workspaces.base import WorkspaceSize

log = structlog.get_logger(__name__)

MIN_IDLE_S = 1.0
"""A session that has worked a moment ago keeps its container when others want a place."""
_MAX_ROWS = 300
_KEPT = (
    "the sandbox of this session had ended ({}) and was rebuilt around its workspace: the files in /workspace are kept; "
    "background jobs, /tmp, kept outputs and the shell's folder and variables are gone"
)


class Sessions:
    """All sessions of this host. One sandbox serves one session and is never handed to another."""

    def __init__(
        self,
        maker: Maker,
        pool: WarmPool | None,
        parking: Parking,
        records: Records,
        *,
        limit: int,
        equip: Callable[[Session, Sandbox], None] | None = None,
    ) -> None:
        """`equip`: gives a session's new sandbox what only the session knows, its way out."""
        self._maker = maker
        self._equip = equip or (lambda _entry, _sandbox: None)
        self._pool = pool
        self._parking = parking
        self._records = records
        self._limit = limit
        self._sessions: dict[str, Session] = {}
        self._starting: dict[str, asyncio.Task[Session]] = {}
        maker.room.make_room = self._give_one_up

    async def open(self, session: str, plan: SandboxPlan, ttl_s: float) -> Session:
        """A session with a fresh sandbox; opening an open one gives it as it is (a repeated request).

        Raises SandboxUnavailable when the host is full or the engine refuses.
        """
        known = self._sessions.get(session)
        if known is not None and known.is_closing:
            await self.close(session)
            known = self._sessions.get(session)
        if known is not None:
            known.used_at = time.monotonic()
            return known
        if session not in self._starting:
            self._check_room()
            # A task of its own: a worker that leaves meanwhile must not leave a container that nobody knows.
            starting = asyncio.get_running_loop().create_task(self._open(session, plan, ttl_s))
            self._starting[session] = starting
            starting.add_done_callback(lambda task: self._forget_start(session, task))
        return await asyncio.shield(self._starting[session])

    async def use(self, session: str) -> tuple[Session, Sandbox]:
        """The session and its living sandbox, ready for a call that begins at once.

        Raises ToolFailure(SESSION_NOT_FOUND), and SandboxUnavailable once after a loss of files: the next call gets a fresh, empty sandbox.
        """
        entry = self._sessions.get(session)
        if entry is None or entry.is_closing:
            raise _not_found()
        entry.used_at = time.monotonic()
        if not entry.is_ready:
            async with entry.lock:
                if entry.is_closing:
                    raise _not_found()
                await self._make_ready(entry)
                entry.used_at = time.monotonic()
        assert entry.sandbox is not None
        return entry, entry.sandbox

    def find(self, session: str) -> Session | None:
        """The session, or None."""
        return self._sessions.get(session)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    async def close(self, session: str) -> bool:
        """Remove the session's sandbox and files; returns when the container is gone. False when there was no such session.

        Raises SandboxUnavailable when the engine refuses: the session is of no more use, and the sweep tries again.
        """
        if session in self._starting:
            await asyncio.wait({self._starting[session]})
        entry = self._sessions.get(session)
        if entry is None:
            return False
        entry.is_closing = True
        async with entry.lock:
            if self._sessions.get(session) is entry:
                if entry.sandbox is not None:
                    await entry.sandbox.remove()
                await self._maker.discard_workspace(entry.workspace)
                await self._forget_parcel(entry)
                self._records.forget_session(session)
                del self._sessions[session]
        return True

    async def close_all(self) -> None:
        """Remove every sandbox and all files, also those that are being started; from now on none is made."""
        self._maker.is_ending = True
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await self._settle([self.close(session) for session in list(self._sessions)])

    async def suspend_all(self, within_s: float) -> None:
        """Give every container up and keep what can be kept, for the next sandboxd; what cannot be packed in time loses what the container had."""
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(within_s):
                await self._settle([self.give_up(entry, must_be_idle=False) for entry in self.all()])
        except TimeoutError:
            log.warning("sessions_not_packed_in_time", within_s=within_s)
        self._maker.is_ending = True
        for entry in self.all():
            if entry.sandbox is not None:
                self._keep(entry)
        await self._settle([entry.sandbox.remove() for entry in self.all() if entry.sandbox is not None])
        await self._settle([self.close(entry.id) for entry in self.all() if not self._is_kept(entry)])

    def adopt(self) -> int:
        """Take over the sessions that an earlier sandboxd of this name kept; their containers are gone. Gives how many."""
        for record in self._records.sessions():
            size = WorkspaceSize(record.plan.workspace_bytes, record.plan.workspace_inodes)
            workspace = self._maker.workspaces.find(record.workspace, size)
            if workspace is None:
                log.error("workspace_missing", workspace=record.workspace)
                self._records.forget_session(record.id)
                continue
            tenant = record.id.partition(":")[0]
            entry = Session(record.id, tenant, record.plan, record.ttl_s, workspace, None, record.generation, record.parcel)
            if record.parcel is not None:
                entry.used_at -= max(0.0, time.time() - record.used_at)
            else:  # nobody knows when it was last used before its sandboxd was killed: its time starts anew
                entry.lost = "sandboxd was started anew"
                entry.news = _KEPT.format(entry.lost)
            self._sessions[record.id] = entry
        return len(self._sessions)

    async def pause(self, entry: Session) -> bool:
        """Freeze an idle session; its next call thaws it. False when it works after all, or has a background job."""
        if not entry.is_ready or entry.is_busy or entry.lock.locked():
            return False
        async with entry.lock:
            sandbox = entry.sandbox
            if sandbox is None or not entry.is_ready or await self._has_jobs(entry, sandbox) or entry.is_busy:
                return False
            entry.is_moving = True
            try:
                await self._maker.engine.pause(sandbox.container)
                entry.is_paused = True
            finally:
                entry.is_moving = False
        return True

    async def give_up(self, entry: Session, *, must_be_idle: bool = True) -> bool:
        """Pack what the container alone has and remove it. False when the session works, has a background job, or could not be packed."""
        if entry.sandbox is None or entry.is_closing or entry.lock.locked() or (must_be_idle and entry.idle_s() < MIN_IDLE_S):
            return False
        async with entry.lock:
            sandbox = entry.sandbox
            if sandbox is None or sandbox.lost is not None or entry.is_busy:
                return False
            entry.is_moving = True
            try:
                return await self._pack_and_remove(entry, sandbox)
            except SandboxUnavailable as error:
                log.warning("session_not_given_up", container=sandbox.container[:12], error=str(error))
                return False
            finally:
                entry.is_moving = False

    def describe(self) -> list[dict[str, Any]]:
        """One row a session, for `status`; no tenant's content. At most as many as an answer has room for."""
        return [entry.describe() for entry in self.all()[:_MAX_ROWS]]

    def __len__(self) -> int:
        return len(self._sessions)

    def _check_room(self) -> None:
        if len(self._sessions) + len(self._starting) >= self._limit:
            raise SandboxUnavailable(
                f"this host already has {self._limit} sessions: close some, add a host, or raise TOOLCREW_MAX_SESSIONS"
            )

    async def _open(self, session: str, plan: SandboxPlan, ttl_s: float) -> Session:
        warm = await self._pool.take(plan) if self._pool is not None else None
        tenant = session.partition(":")[0]
        if warm is not None:
            entry = Session(session, tenant, plan, ttl_s, warm.workspace, warm.sandbox)
        else:
            entry = await self._open_cold(session, tenant, plan, ttl_s)
        assert entry.sandbox is not None
        self._equip(entry, entry.sandbox)
        self._sessions[session] = entry
        self._keep(entry)
        return entry

    async def _open_cold(self, session: str, tenant: str, plan: SandboxPlan, ttl_s: float) -> Session:
        await self._maker.room.take()
        try:
            workspace = await self._maker.make_workspace(plan)
        except BaseException:
            self._maker.room.give_back()
            raise
        try:
            sandbox = await self._maker.make(plan, workspace, 1)
        except BaseException:
            await asyncio.shield(self._maker.discard_workspace(workspace))
            raise
        return Session(session, tenant, plan, ttl_s, workspace, sandbox)

    def _forget_start(self, session: str, task: "asyncio.Task[Session]") -> None:
        del self._starting[session]
        if not task.cancelled():
            task.exception()  # whoever asked may have left: then nobody else takes it

    async def _make_ready(self, entry: Session) -> None:
        sandbox = entry.sandbox
        if sandbox is None:
            await self._start_again(entry)
        elif sandbox.lost is not None:
            await self._rebuild(entry, sandbox)
        elif entry.is_paused:
            await self._maker.engine.unpause(sandbox.container)
            entry.is_paused = False

    async def _rebuild(self, entry: Session, sandbox: Sandbox) -> None:
        if not entry.workspace.outlives_container and not sandbox.loss_told:
            sandbox.loss_told = True
            raise SandboxUnavailable(
                f"the sandbox of this session died ({sandbox.lost}) and its files are lost; the next call gets a fresh, empty one"
            )
        await sandbox.remove()
        # Whoever was told by his own call's result has no need of it again.
        entry.lost = sandbox.lost
        is_news = entry.workspace.outlives_container and not sandbox.loss_told
        entry.news = _KEPT.format(sandbox.lost) if is_news else None
        entry.sandbox, entry.is_paused = None, False
        await self._start_again(entry)

    async def _start_again(self, entry: Session) -> None:
        """A new container around the session's workspace, with what was packed of the last one."""
        await self._maker.room.take()
        sandbox = await self._maker.make(entry.plan, entry.workspace, entry.generation + 1)
        self._equip(entry, sandbox)
        if entry.lost is not None:
            entry.was_rebuilt = True
        elif entry.parcel is not None:
            await self._unpack(entry, sandbox)
        entry.sandbox, entry.generation, entry.lost = sandbox, entry.generation + 1, None
        await self._forget_parcel(entry)
        self._keep(entry)

    async def _unpack(self, entry: Session, sandbox: Sandbox) -> None:
        try:
            await self._parking.unpack(entry, sandbox)
        except SandboxUnavailable as error:
            log.error("parcel_not_unpacked", container=sandbox.container[:12], error=str(error))
            await self._maker.discard(sandbox)
            raise

    async def _pack_and_remove(self, entry: Session, sandbox: Sandbox) -> bool:
        if entry.is_paused:
            await self._maker.engine.unpause(sandbox.container)
            entry.is_paused = False
        if await self._has_jobs(entry, sandbox):
            return False
        entry.parcel = await self._parking.pack(entry, sandbox)
        entry.sandbox = None
        self._keep(entry)
        await self._maker.discard(sandbox)
        return True

    async def _has_jobs(self, entry: Session, sandbox: Sandbox) -> bool:
        entry.looked_at = time.monotonic()
        try:
            return parse_attestation(await sandbox.ask({"op": "attest", "timeout_s": 5.0})).jobs > 0
        except ValueError as error:
            raise SandboxUnavailable(f"the guest does not say whether it has jobs: {error}") from error

    async def _give_one_up(self) -> bool:
        """For another's sake: a warm sandbox, else the container of the session that has been idle for the longest time."""
        if self._pool is not None and await self._pool.give_up_one():
            return True
        idle = [entry for entry in self.all() if entry.sandbox is not None and entry.idle_s() >= MIN_IDLE_S]
        for entry in sorted(idle, key=lambda one: one.used_at):
            if await self.give_up(entry):
                return True
        return False

    def _keep(self, entry: Session) -> None:
        if self._is_kept(entry):
            self._records.keep_session(entry.record())
        else:
            self._records.forget_session(entry.id)

    def _is_kept(self, entry: Session) -> bool:
        """Whether its files would be there without this process: as a workspace, or as a parcel."""
        return entry.workspace.outlives_container or (entry.sandbox is None and entry.parcel is not None)

    async def _forget_parcel(self, entry: Session) -> None:
        try:
            await self._parking.forget(entry)
        except SandboxUnavailable as error:
            log.error("parcel_not_removed", error=str(error))

    async def _settle(self, work: list[Coroutine[Any, Any, Any]]) -> None:
        """All of it, whatever some of it raises. A sandbox that would not go has been logged by itself."""
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, SandboxUnavailable):
                log.error("sandbox_work_failed", error=repr(result))


def _not_found() -> ToolFailure:
    return ToolFailure(
        ErrorCode.SESSION_NOT_FOUND,
        "no such session on this host: it was closed, expired, or its host was restarted; open a new one",
    )
