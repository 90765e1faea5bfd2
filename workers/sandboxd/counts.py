"""What this sandboxd has counted since it began, and what its sandboxes do now: told in `status`, made into metrics by the host's worker."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from contract.errors import SandboxUnavailable
from contract.metrics import COUNT, SANDBOX_START_SECONDS, SUM, bucket_part
from workers.sandboxd.session import Session


class SandboxCounts:
    """Totals, which only grow. They end with the process: its `boot` says when they begin anew."""

    def __init__(self) -> None:
        self.oom = 0
        self.kills = Counter[str]()
        self.lost = Counter[str]()
        self._failed_starts = 0
        self._starts: dict[str, float] = {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of one container."""
        began = time.monotonic()
        try:
            yield
        except SandboxUnavailable:
            self._failed_starts += 1
            raise
        took_s = time.monotonic() - began
        for part, by in ((COUNT, 1.0), (SUM, took_s), (bucket_part(SANDBOX_START_SECONDS, took_s), 1.0)):
            if part is not None:
                self._starts[part] = self._starts.get(part, 0.0) + by

    def describe(self) -> dict[str, Any]:
        """For `status`. `starts`: by part of the histogram (contract/metrics.py)."""
        return {
            "starts": dict(self._starts),
            "failed_starts": self._failed_starts,
            "oom": self.oom,
            "kills": dict(self.kills),
            "lost": dict(self.lost),
        }


def count_states(sessions: Iterable[Session], warm: int) -> dict[str, int]:
    """How many containers are in which state now."""
    states = Counter[str]({"busy": 0, "idle": 0, "paused": 0, "lost": 0})
    for session in sessions:
        if session.sandbox is None:
            continue
        if session.sandbox.lost is not None:
            states["lost"] += 1
        elif session.is_busy:
            states["busy"] += 1
        else:
            states["paused" if session.is_paused else "idle"] += 1
    return {**states, "warm": warm}
