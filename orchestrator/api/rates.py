"""How many requests a key may make: a bucket of them each, in this process."""

import time
from collections.abc import Callable

from orchestrator.api.problems import ApiCode, ApiProblem

MAX_KEYS = 10_000


class Rates:
    """`per_s` requests a second and `burst` at once for each key. `clock`: monotonic seconds."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> None:
        """One request of a key. Raises ApiProblem, with when to come again, for one too many."""
        now = self._clock()
        left, at = self._left.pop(key, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        is_over = left < 1.0
        # Put back behind the others: those that were used longest ago are forgotten first, and are full by then.
        self._left[key] = (left if is_over else left - 1.0, now)
        while len(self._left) > MAX_KEYS:
            del self._left[next(iter(self._left))]
        if is_over:
            wait_s = max(1, round((1.0 - left) / self._per_s + 0.5))
            raise ApiProblem(
                ApiCode.TOO_MANY_REQUESTS,
                f"more than {self._per_s:g} requests a second with this key: come again in {wait_s} s, or have the "
                "operator raise TOOLCREW_API_RATE",
                headers={"Retry-After": str(wait_s)},
            )
