"""One clock for all hosts: Redis's. What each process's own clock differs by is learned, so that a wrong clock expires
no call.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

SKEW_TOLD_S = 5.0
"""From here on a wrong clock is worth a warning."""


class SharedClock:
    """Unix seconds as Redis counts them. Until `learn` was called: this host's own. Safe between threads: one float is
    written.
    """

    def __init__(self, local: Callable[[], float] = time.time) -> None:
        self._local = local
        self.offset_s = 0.0

    def __call__(self) -> float:
        return self._local() + self.offset_s

    def learn(self, redis_now: float) -> float:
        """Take over what Redis's TIME said just now; gives by how much this host's clock is behind it, in seconds."""
        self.offset_s = redis_now - self._local()
        return self.offset_s


def format_instant(at: float, unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Unix seconds as everybody is shown them: ISO 8601, UTC, to that unit."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=unit).replace("+00:00", "Z")
