"""Which session has which sandbox: opening, finding, rebuilding after a loss, expiring, closing."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from workers.sandboxd.engine import LABEL_CREATED_AT, LABEL_PRODUCT, LABEL_SANDBOXD, Engine
from workers.sandboxd.sandbox import Sandbox

log = structlog.get_logger(__name__)

ConfigBuilder = Callable[[str, Mapping[str, str]], Mapping[str, Any]]
"""(image, labels) -> raw container configuration."""
SWEEP_EVERY_S = 5.0
NEVER_STARTED_S = 120.0
"""A container is started seconds after it was created, or never."""
_MAX_ROWS = 300


@dataclass(eq=False)
class Session:
    """A session's claim on this host. `sandbox` is replaced when it was lost; the loss is told once, then a fresh one is made.

    `is_closing`: somebody has closed it, or its time was over. It is in the list until its container is gone, for nobody's use.
    """

    id: str
    image: str
    ttl_s: float
    sandbox: Sandbox
    used_at: float = field(default_factory=time.monotonic)
    is_closing: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """All sessions of this host. One sandbox serves one session and is never handed to another."""

    def __init__(self, engine: Engine, name: str, build_config: ConfigBuilder, limit: int) -> None:
        self._engine = engine
        self._name = name
        self._build_config = build_config
        self._limit = limit
        self._sessions: dict[str, Session] = {}
        self._starting: dict[str, asyncio.Task[Session]] = {}
        self._unwanted: set[Sandbox] = set()
        self._is_ending = False

    async def open(self, session: str, image: str, ttl_s: float) -> Session:
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
            starting = asyncio.get_running_loop().create_task(self._open(session, image, ttl_s))
            self._starting[session] = starting
            starting.add_done_callback(lambda task: self._forget_start(session, task))
        return await asyncio.shield(self._starting[session])

    async def use(self, session: str) -> Session:
        """The session with a living sandbox, ready for a call.

        Raises ToolFailure(SESSION_NOT_FOUND), and SandboxUnavailable once after a loss: the next call gets a fresh, empty sandbox.
        """
        entry = self._sessions.get(session)
        if entry is None or entry.is_closing:
            raise _not_found()
        entry.used_at = time.monotonic()
        if entry.sandbox.lost is None:
            return entry
        async with entry.lock:
            if entry.is_closing:
                raise _not_found()
            if entry.sandbox.lost is not None:
                await self._rebuild(entry)
        return entry

    def find(self, session: str) -> Session | None:
        """The session, or None."""
        return self._sessions.get(session)

    async def close(self, session: str) -> bool:
        """Remove the session's sandbox; returns when the container is gone. False when there was no such session.

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
                await entry.sandbox.remove()
                del self._sessions[session]
        return True

    async def close_all(self) -> None:
        """Remove every sandbox, also those that are being started; from now on none is made."""
        self._is_ending = True
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await self._try_all([self.close(session) for session in list(self._sessions)] + [self._discard(one) for one in self._unwanted])

    async def sweep_leftovers(self) -> int:
        """Remove what our predecessor left: containers of this sandboxd's name that no session holds, and any that were never started."""
        held = {entry.sandbox.container for entry in self._sessions.values()}
        ours = [container for container in await self._engine.list_ours(self._name) if container not in held]
        await asyncio.gather(*(self._engine.remove(container) for container in ours))
        never_started = await self._engine.list_never_started(NEVER_STARTED_S)
        # Another sandboxd's that would not go is no reason not to start.
        results = await asyncio.gather(*(self._engine.remove(container) for container in never_started), return_exceptions=True)
        return len(ours) + results.count(None)

    async def expire_idle(self) -> None:
        """For ever: close sessions that no call has used for their time to live, and try again to remove what would not go."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self._try_all([*self._overdue_closings(), *self._overdue_removals()])

    def describe(self) -> list[dict[str, Any]]:
        """One row a session, for `status`; no tenant's content. At most as many as an answer has room for."""
        now = time.monotonic()
        return [
            {
                "container": entry.sandbox.container[:12],
                "image": entry.image,
                "generation": entry.sandbox.generation,
                "calls": len(entry.sandbox.calls),
                "idle_s": round(now - entry.used_at, 3),
                "lost": entry.sandbox.lost,
            }
            for entry in list(self._sessions.values())[:_MAX_ROWS]
        ]

    def __len__(self) -> int:
        return len(self._sessions)

    def _check_room(self) -> None:
        if len(self._sessions) + len(self._starting) + len(self._unwanted) >= self._limit:
            raise SandboxUnavailable(
                f"this host already holds {self._limit} sandboxes: close sessions, add a host, or raise TOOLCREW_MAX_SANDBOXES"
            )

    async def _open(self, session: str, image: str, ttl_s: float) -> Session:
        entry = Session(session, image, ttl_s, await self._start(image, 1))
        self._sessions[session] = entry
        return entry

    def _forget_start(self, session: str, task: "asyncio.Task[Session]") -> None:
        del self._starting[session]
        if not task.cancelled():
            task.exception()  # whoever asked may have left: then nobody else takes it

    async def _rebuild(self, entry: Session) -> None:
        lost = entry.sandbox
        if not lost.loss_told:
            lost.loss_told = True
            raise SandboxUnavailable(
                f"the sandbox of this session died ({lost.lost}) and its files are lost; the next call gets a fresh, empty one"
            )
        await lost.remove()
        entry.sandbox = await self._start(entry.image, lost.generation + 1)

    async def _start(self, image: str, generation: int) -> Sandbox:
        """Create, start and greet a sandbox. Raises SandboxUnavailable; what was created is then removed, by the sweep if need be."""
        if self._is_ending:
            raise SandboxUnavailable("sandboxd is ending: try again when it is back")
        labels = {
            LABEL_PRODUCT: "sandbox",
            LABEL_SANDBOXD: self._name,
            LABEL_CREATED_AT: str(int(time.time())),
        }
        attached = await self._engine.start(self._build_config(image, labels), f"toolcrew-{self._name}-{secrets.token_hex(8)}")
        sandbox = Sandbox(self._engine, generation, attached.id)
        try:
            await sandbox.attach(attached.sock)
        except BaseException:
            await self._try_all([self._discard(sandbox)])
            raise
        return sandbox

    async def _discard(self, sandbox: Sandbox) -> None:
        """Remove a sandbox that no session has; it is remembered until it is gone."""
        self._unwanted.add(sandbox)
        await sandbox.remove()
        self._unwanted.discard(sandbox)

    def _overdue_closings(self) -> list[Coroutine[Any, Any, Any]]:
        """A session whose lock is held is being rebuilt or closed by another."""
        now = time.monotonic()
        due: list[Coroutine[Any, Any, Any]] = []
        for entry in self._sessions.values():
            is_idle = not entry.sandbox.calls and now - entry.used_at > entry.ttl_s
            if (is_idle or entry.is_closing) and not entry.lock.locked():
                if not entry.is_closing:
                    log.info("session_expired", ttl_s=entry.ttl_s)
                due.append(self.close(entry.id))
        return due

    def _overdue_removals(self) -> list[Coroutine[Any, Any, Any]]:
        lost = [entry.sandbox for entry in self._sessions.values() if entry.sandbox.lost is not None]
        return [sandbox.remove() for sandbox in lost if not sandbox.is_removed] + [self._discard(one) for one in self._unwanted]

    async def _try_all(self, work: list[Coroutine[Any, Any, Any]]) -> None:
        """All of it, whatever some of it raises. A sandbox that would not go has been logged by itself."""
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, SandboxUnavailable):
                log.error("sandbox_work_failed", error=repr(result))


def _not_found() -> ToolFailure:
    return ToolFailure(
        ErrorCode.SESSION_NOT_FOUND,
        "no such session on this host: it was closed, expired, or its host was restarted; open a new one",
    )
