"""Which session has which sandbox: opening, finding, rebuilding after a loss, expiring, closing."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from workers.sandboxd.engine import LABEL_PRODUCT, LABEL_SANDBOXD, Engine
from workers.sandboxd.sandbox import Sandbox, start_sandbox

log = structlog.get_logger(__name__)

ConfigBuilder = Callable[[str, Mapping[str, str]], Mapping[str, Any]]
"""(image, labels) -> raw container configuration."""
SWEEP_EVERY_S = 5.0


@dataclass
class Session:
    """A session's claim on this host. `sandbox` is replaced when it was lost; the loss is told once, then a fresh one is made."""

    id: str
    image: str
    ttl_s: float
    sandbox: Sandbox
    used_at: float = field(default_factory=time.monotonic)
    loss_told: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def rebuilt(self) -> bool:
        return self.sandbox.generation > 1


class Sessions:
    """All sessions of this host. One sandbox serves one session and is never handed to another."""

    def __init__(self, engine: Engine, name: str, build_config: ConfigBuilder, limit: int) -> None:
        self._engine = engine
        self._name = name
        self._build_config = build_config
        self._limit = limit
        self._sessions: dict[str, Session] = {}
        self._opening = 0

    async def open(self, session: str, image: str, ttl_s: float) -> Session:
        """A session with a fresh sandbox; opening an open one gives it as it is (a repeated request).

        Raises SandboxUnavailable when the host is full or the engine refuses.
        """
        known = self._sessions.get(session)
        if known is not None:
            return known
        if len(self._sessions) + self._opening >= self._limit:
            raise SandboxUnavailable(
                f"this host already holds {self._limit} sandboxes: close sessions, add a host, or raise TOOLCREW_MAX_SANDBOXES"
            )
        self._opening += 1
        try:
            sandbox = await self._start(image, 1)
        finally:
            self._opening -= 1
        winner = self._sessions.setdefault(session, Session(session, image, ttl_s, sandbox))
        if winner.sandbox is not sandbox:
            # The same request came twice at once: one sandbox is enough.
            await sandbox.remove()
        return winner

    async def use(self, session: str) -> Session:
        """The session with a living sandbox, ready for a call.

        Raises ToolFailure(SESSION_NOT_FOUND), and SandboxUnavailable once after a loss: the next call gets a fresh, empty sandbox.
        """
        entry = self._sessions.get(session)
        if entry is None:
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND,
                "no such session on this host: it was closed, expired, or its host was restarted; open a new one",
            )
        entry.used_at = time.monotonic()
        if entry.sandbox.lost is None:
            return entry
        async with entry.lock:
            if entry.sandbox.lost is None:
                return entry
            if not entry.loss_told:
                entry.loss_told = True
                raise SandboxUnavailable(
                    f"the sandbox of this session died ({entry.sandbox.lost}) and its files are lost; the next call gets a fresh, empty one"
                )
            await entry.sandbox.remove()
            entry.sandbox = await self._start(entry.image, entry.sandbox.generation + 1)
            entry.loss_told = False
        return entry

    def find(self, session: str) -> Session | None:
        """The session, or None."""
        return self._sessions.get(session)

    async def close(self, session: str) -> bool:
        """Remove the session's sandbox; returns when the container is gone. False when there was no such session."""
        entry = self._sessions.pop(session, None)
        if entry is None:
            return False
        await entry.sandbox.remove()
        return True

    async def close_all(self) -> None:
        """Remove every sandbox."""
        results = await asyncio.gather(*(self.close(session) for session in list(self._sessions)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                log.error("sandbox_not_removed", error=str(result))

    async def sweep_leftovers(self) -> int:
        """Remove containers of this sandboxd's name that no session holds: what its predecessor left."""
        held = {entry.sandbox.container for entry in self._sessions.values()}
        leftovers = [container for container in await self._engine.list_ours(self._name) if container not in held]
        await asyncio.gather(*(self._engine.remove(container) for container in leftovers))
        return len(leftovers)

    async def expire_idle(self) -> None:
        """For ever: close sessions that no call has used for their time to live."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            now = time.monotonic()
            for entry in list(self._sessions.values()):
                if not entry.sandbox.calls and now - entry.used_at > entry.ttl_s:
                    log.info("session_expired", ttl_s=entry.ttl_s)
                    try:
                        await self.close(entry.id)
                    except SandboxUnavailable as error:
                        log.error("sandbox_not_removed", error=str(error))

    def describe(self) -> list[dict[str, Any]]:
        """One row a session, for `status`; no tenant's content."""
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
            for entry in self._sessions.values()
        ]

    def __len__(self) -> int:
        return len(self._sessions)

    async def _start(self, image: str, generation: int) -> Sandbox:
        labels = {
            LABEL_PRODUCT: "sandbox",
            LABEL_SANDBOXD: self._name,
            "toolcrew.created_at": str(int(time.time())),
        }
        name = f"toolcrew-{self._name}-{secrets.token_hex(8)}"
        return await start_sandbox(self._engine, self._build_config(image, labels), name, generation)
