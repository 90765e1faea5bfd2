"""How long a sandbox may exist: its own end, when everybody who would remove it is gone."""

from __future__ import annotations

import time


class LifeOver(Exception):
    """The sandbox is as old as it may get."""


class Life:
    """Counts from its making, on the clock that also runs while the sandbox is frozen or the host sleeps. `life_s` None: no limit."""

    __slots__ = ("_ends_at", "_life_s")

    def __init__(self, life_s: float | None) -> None:
        self._life_s = life_s
        self._ends_at = None if life_s is None else _now() + life_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, None without one."""
        return None if self._ends_at is None else self._ends_at - _now()

    def check(self) -> None:
        """Raises LifeOver."""
        left_s = self.left_s
        if left_s is not None and left_s <= 0:
            raise LifeOver(f"the sandbox reached its maximum life of {self._life_s:g} s")


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
