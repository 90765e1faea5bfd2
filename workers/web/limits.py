"""What one call may cost: sizes in bytes, durations in seconds, and one wall clock over all of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import ErrorCode, ToolFailure

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class FetchLimits:
    """The caps of one exchange. The total is the call's own limit, see Deadline."""

    resolve_s: float = 3.0
    connect_s: float = 5.0
    tls_s: float = 5.0
    first_byte_s: float = 10.0
    rate_window_s: float = 10.0
    min_rate: float = 1024.0
    """Bytes a second that must come, on the average of every window after the first byte."""
    header_bytes: int = 64 * KIB
    header_lines: int = 100
    wire_bytes: int = 5_000_000
    """Of a body as it comes, its framing included."""
    decoded_bytes: int = 10_000_000
    ratio: int = 100
    """How many times its size a body may unpack to."""
    ratio_floor_bytes: int = 64 * KIB
    """Below this much unpacked text the ratio does not count: an empty table packs well."""
    error_body_bytes: int = 64 * KIB
    """Of the body of an answer that is an error, as much is read."""
    redirects: int = 5


class Deadline:
    """`total_s` from now, by a clock that nobody sets: redirects, name lookups and parsing all count."""

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total_s = total_s
        self._until = clock() + total_s

    def now(self) -> float:
        return self._clock()

    def left(self, doing: str, at_most: float | None = None) -> float:
        """Seconds for a wait, more than 0 and at most `at_most`. Raises ToolFailure(TIMEOUT) that says what it was
        `doing`.
        """
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
