"""How long many things took, in a few hundred bytes: counts in buckets that grow by a tenth."""

import math
from collections.abc import Mapping

FLOOR_S = 0.0001
GROWTH = 1.1
MAX_S = 1e12
"""Longer times, which only clocks without sense tell, share its bucket."""
_LOG_GROWTH = math.log(GROWTH)


class LogHistogram:
    """Seconds, counted. Quantiles are right to 5 %; count, sum and maximum are exact. The same set in any order gives
    the same histogram.
    """

    __slots__ = ("_buckets", "_total_us", "count", "max_s")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._total_us = 0
        self.count = 0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        """One more; below zero, as clocks of two machines can make it, counts as zero."""
        seconds = max(0.0, seconds)
        bucket = bucket_of(seconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        # A sum of floats depends on their order, one of integers does not.
        self._total_us += round(seconds * 1e6)
        self.count += 1
        self.max_s = max(self.max_s, seconds)

    @property
    def mean_s(self) -> float:
        return self._total_us / 1e6 / self.count if self.count else 0.0

    @property
    def buckets(self) -> Mapping[int, int]:
        """Counts by bucket; those that are empty are left out."""
        return self._buckets

    def quantile(self, share: float) -> float:
        """What `share` of them do not exceed; 0.0 when there are none."""
        wanted, reached = math.ceil(share * self.count), 0
        for bucket in sorted(self._buckets):
            reached += self._buckets[bucket]
            if reached >= wanted:
                return min(middle_of(bucket), self.max_s)
        return 0.0


def bucket_of(seconds: float) -> int:
    """Bucket 0 holds all that is not longer than FLOOR_S."""
    return math.floor(place_of(seconds))


def place_of(seconds: float) -> float:
    """Its bucket, and how far into it."""
    return 0.5 if seconds <= FLOOR_S else 1 + max(0.0, math.log(min(seconds, MAX_S) / FLOOR_S) / _LOG_GROWTH)


def start_of(bucket: int) -> float:
    """The shortest time of a bucket."""
    return 0.0 if bucket == 0 else FLOOR_S * GROWTH ** (bucket - 1)


def middle_of(bucket: int) -> float:
    """The time that stands for all of a bucket."""
    return FLOOR_S / 2 if bucket == 0 else float(FLOOR_S * GROWTH ** (bucket - 0.5))
