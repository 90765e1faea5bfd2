"""Sessions that were attached a moment ago, so that not every call reads from Redis where its session lives."""

import time
from collections.abc import Awaitable, Callable

from orchestrator.dispatch.sessions import Session

FRESH_S = 60.0
MAX_SESSIONS = 10_000

Name = tuple[str, str, str]
"""A tenant, its session, and the API key that calls."""


class SessionCache:
    """Keeps attached sessions of one process. A kept session may have been closed: the caller forgets it when a call
    says so. `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[Name, tuple[Session, float]] = {}

    async def find(self, name: Name, attach: Callable[[], Awaitable[Session]]) -> Session:
        """Return the kept session, or attach it. Raises as `attach` does."""
        session, at = self._sessions.get(name, (None, 0.0))
        if session is not None and self._clock() - at < FRESH_S:
            return session
        self.forget(name)
        session = await attach()
        self._sessions[name] = (session, self._clock())
        while len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    def forget(self, name: Name) -> None:
        self._sessions.pop(name, None)
