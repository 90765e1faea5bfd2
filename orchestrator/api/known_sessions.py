"""Sessions that calls have been made in a moment ago: each call need not ask Redis again where they live."""

import time
from collections.abc import Awaitable, Callable

from orchestrator.dispatch.sessions import Session

FRESH_S = 60.0
MAX_SESSIONS = 10_000

Name = tuple[str, str, str]
"""A tenant, its session, and the API key that calls."""


class KnownSessions:
    """Of one process. A session that is known may have been closed: a call says so, and it is to be forgotten then.
    `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Name, tuple[Session, float]] = {}

    async def find(self, name: Name, attach: Callable[[], Awaitable[Session]]) -> Session:
        """The session, attached now unless that was done a moment ago. Raises as `attach` does."""
        session, at = self._known.get(name, (None, 0.0))
        if session is not None and self._clock() - at < FRESH_S:
            return session
        self.forget(name)
        session = await attach()
        self._known[name] = (session, self._clock())
        while len(self._known) > MAX_SESSIONS:
            del self._known[next(iter(self._known))]
        return session

    def forget(self, name: Name) -> None:
        self._known.pop(name, None)
