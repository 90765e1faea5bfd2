"""How fast frames of connections may follow each other: the host reads every sandbox's in one loop."""

from __future__ import annotations

import time


class Pace:
    """A store of tokens that fills with time, up to one second's worth."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._tokens = per_s
        self._counted_at = time.monotonic()

    def has(self, tokens: float) -> bool:
        now = time.monotonic()
        self._tokens = min(self._per_s, self._tokens + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        return self._tokens >= tokens

    def take(self, tokens: float) -> None:
        self._tokens -= tokens

    def ready_at(self, tokens: float) -> float:
        """When there will be as many, on the clock of time.monotonic()."""
        return self._counted_at + max(tokens - self._tokens, 0.0) / self._per_s
