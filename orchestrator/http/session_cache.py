"""Cache of handles of open sessions, so that not every call reads the location of its session from Redis."""

import time
from collections.abc import Awaitable, Callable

from toolcrew.orchestrator.sessions.session import Session

FRESH_S = 60.0
MAX_SESSIONS = 10_000

Name = tuple[str, str, str]
"""Key of an entry in the cache: the tenant, its session, and the API key of the request.

A handle makes its calls with one API key, so each API key has its own entry.
"""


class SessionCache:
    """Caches handles of open sessions in one process for FRESH_S seconds.

    The session of a cached handle may already be closed. The caller calls `forget` when a call reports
    SESSION_NOT_FOUND.
    """

    def __init__(self) -> None:
        self._sessions: dict[Name, tuple[Session, float]] = {}

    async def find(self, name: Name, attach: Callable[[], Awaitable[Session]]) -> Session:
        """Return the cached handle, or a new handle from `attach`. Raises the errors of `attach`."""
        session, at = self._sessions.get(name, (None, 0.0))
        if session is not None and time.monotonic() - at < FRESH_S:
            return session
        self.forget(name)
        session = await attach()
        self._sessions[name] = (session, time.monotonic())
        while len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    def forget(self, name: Name) -> None:
        """Remove a session from the cache, because it no longer exists."""
        self._sessions.pop(name, None)
