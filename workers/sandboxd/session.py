"""One session on this host: its plan, its workspace, and the sandbox that works in it for now."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from workers.sandboxd.classes import SandboxPlan
from workers.sandboxd.records import SessionRecord
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.workspaces.base import Workspace


@dataclass(eq=False)
class Session:
    """A session's claim on this host.

    `sandbox`: replaced when it was lost; None while the session's container is given up (evicted), or after sandboxd was started anew.
    `parcel`: what of the container was packed when it was given up, to be unpacked into the next. `lost`: why there is no sandbox, when it was
    not given up in order. `news`: what the next answer tells. `is_closing`: it is in the list until its container is gone, for nobody's use.
    `overfull_bytes`: what its workspace held when that was last found to be too much.
    `is_moving`: its sandbox is being frozen or given up, and calls wait for the lock.
    """

    id: str
    tenant: str
    plan: SandboxPlan
    ttl_s: float
    workspace: Workspace
    sandbox: Sandbox | None
    generation: int = 1
    parcel: str | None = None
    lost: str | None = None
    news: str | None = None
    used_at: float = field(default_factory=time.monotonic)
    looked_at: float = 0.0
    is_paused: bool = False
    is_moving: bool = False
    is_closing: bool = False
    was_rebuilt: bool = False
    overfull_bytes: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_ready(self) -> bool:
        """Whether a call can begin at once."""
        return self.sandbox is not None and self.sandbox.lost is None and not self.is_paused and not self.is_moving

    @property
    def is_busy(self) -> bool:
        return self.sandbox is not None and bool(self.sandbox.calls)

    def idle_s(self) -> float:
        """Seconds since its last call; 0 while one runs."""
        return 0.0 if self.is_busy else time.monotonic() - self.used_at

    def record(self) -> SessionRecord:
        """What is kept of it over sandboxd's own death."""
        used_at = time.time() - (time.monotonic() - self.used_at)
        return SessionRecord(self.id, self.plan, self.ttl_s, self.workspace.name, self.generation, self.parcel, used_at)

    def take_news(self) -> str | None:
        """Told once."""
        news, self.news = self.news, None
        return news

    def describe_sandbox(self, sandbox: Sandbox) -> dict[str, Any]:
        """What a result tells of its sandbox."""
        told = {"id": sandbox.container[:12], "generation": sandbox.generation, "rebuilt": self.was_rebuilt}
        news = self.take_news()
        return told | ({"news": news} if news else {})

    def describe(self) -> dict[str, Any]:
        """A row of `status`; no tenant's content."""
        sandbox = self.sandbox
        return {
            "container": sandbox.container[:12] if sandbox is not None else None,
            "image": self.plan.image,
            "generation": self.generation,
            "calls": len(sandbox.calls) if sandbox is not None else 0,
            "idle_s": round(time.monotonic() - self.used_at, 3),
            "lost": sandbox.lost if sandbox is not None else self.lost,
            "state": self._state(),
        }

    def _state(self) -> str:
        if self.sandbox is None:
            return "lost" if self.lost is not None else "evicted"
        if self.sandbox.lost is not None:
            return "lost"
        return "paused" if self.is_paused else "ready"
