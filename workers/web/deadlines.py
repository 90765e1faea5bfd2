"""One wall clock for a whole call: redirects, name lookups and parsing all count."""

import time
from collections.abc import Callable

from contract.errors import ErrorCode, ToolFailure


class Deadline:
    """`total_s` from now, by a clock that nobody sets."""

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total_s = total_s
        self._until = clock() + total_s

    def now(self) -> float:
        return self._clock()

    def left(self, doing: str, at_most: float | None = None) -> float:
        """Seconds for a wait, more than 0 and at most `at_most`. Raises ToolFailure(TIMEOUT) that says what it was `doing`."""
        left = self._until - self._clock()
        if left <= 0:
            raise self.passed(doing)
        return left if at_most is None else min(left, at_most)

    def is_within(self, seconds: float) -> bool:
        """Whether a wait of so long would still end before it."""
        return self._clock() + seconds < self._until

    def passed(self, doing: str) -> ToolFailure:
        return ToolFailure(
            ErrorCode.TIMEOUT,
            f"the limit of {self.total_s:g} s passed while {doing}: try again with a larger timeout, or another source",
            limit_s=self.total_s,
        )
