"""Limits of one call: sizes in bytes, durations in seconds, and one deadline over all steps."""

import time
from dataclasses import dataclass

from toolcrew.contract.errors import ErrorCode, ToolFailure

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class FetchLimits:
    """Limits of one exchange. The total time is the limit of the call, see Deadline."""

    resolve_s: float = 3.0
    connect_s: float = 5.0
    tls_s: float = 5.0
    first_byte_s: float = 10.0
    rate_window_s: float = 10.0
    min_rate: float = 1024.0
    """Minimum rate in bytes per second, as the average of every window after the first byte."""
    header_bytes: int = 64 * KIB
    header_lines: int = 100
    wire_bytes: int = 5_000_000
    """Maximum number of bytes of a body as transferred: compressed, and with its framing."""
    decoded_bytes: int = 10_000_000
    ratio: int = 100
    """Maximum ratio of the decompressed size to the compressed size."""
    ratio_floor_bytes: int = 64 * KIB
    """The ratio applies only above this decompressed size: an empty table compresses well."""
    error_body_bytes: int = 64 * KIB
    """Limit of the bytes that are read from the body of an error response."""
    redirects: int = 5


class Deadline:
    """Deadline `total_s` seconds from now, on a monotonic clock. It applies to everything together: redirects, name
    lookups, transfers and parsing.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self._until = time.monotonic() + total_s

    def now(self) -> float:
        return time.monotonic()

    def remaining_s(self, step: str, at_most: float | None = None) -> float:
        """Return the seconds for a wait: more than 0 and at most `at_most`. Raises ToolFailure(TIMEOUT) when the
        deadline has passed; the message names the `step`.
        """
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise self.passed(step)
        return seconds if at_most is None else min(seconds, at_most)

    def is_within(self, seconds: float) -> bool:
        """Return whether a wait of `seconds` ends before the deadline."""
        return time.monotonic() + seconds < self._until

    def passed(self, step: str) -> ToolFailure:
        return ToolFailure(
            ErrorCode.TIMEOUT,
            f"the limit of {self.total_s:g} s passed while {step}: try again with a larger timeout, or another source",
            limit_s=self.total_s,
        )
