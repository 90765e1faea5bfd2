"""What a report keeps of a batch while it reads: sums by time in at most some hundred buckets, and when each item
ran.
"""

import math
from array import array
from collections import Counter

MAX_BUCKETS = 600
MAX_NAMED = 400
_END_OF_TIME = 1e15
DONE, FAILED, RETRIED, RUNNING = range(4)
"""How an attempt ended; RUNNING: not yet."""


def within_time(at: float) -> float:
    """Unix seconds that can be drawn, however little sense a clock makes."""
    return max(-_END_OF_TIME, min(_END_OF_TIME, at))


class TimeSeries:
    """Sums by name and time. Buckets are seconds that double in width as the time grows that they must cover; the same
    set gives the same sums.
    """

    def __init__(self) -> None:
        self.width_s = 1
        self._sums: dict[str, Counter[int]] = {}
        self._low: int | None = None
        self._high = 0

    def add(self, name: str, at: float, amount: int) -> None:
        """`amount` at `at`."""
        bucket = math.floor(within_time(at)) // self.width_s
        self._low = bucket if self._low is None else min(bucket, self._low)
        self._high = max(bucket, self._high) if self._sums else bucket
        self._sums.setdefault(name, Counter())[bucket] += amount
        while self._high - self._low >= MAX_BUCKETS:
            self._halve()

    def added_up(self, name: str) -> list[tuple[float, float]]:
        """(Unix seconds at which a bucket ends, all until then), by time."""
        points, sum_ = list[tuple[float, float]](), 0
        for bucket, amount in sorted(self._sums.get(name, Counter()).items()):
            sum_ += amount
            points.append((float((bucket + 1) * self.width_s), float(sum_)))
        return points

    def _halve(self) -> None:
        self.width_s *= 2
        self._low, self._high = (self._low or 0) // 2, self._high // 2
        for name, sums in self._sums.items():
            halved: Counter[int] = Counter()
            for bucket, amount in sums.items():
                halved[bucket // 2] += amount
            self._sums[name] = halved


class Spans:
    """From when until when each attempt ran, 17 bytes each; with their items' ids while there are few."""

    def __init__(self) -> None:
        self.begins, self.ends, self.outcomes = array("d"), array("d"), array("B")
        self.names: list[str] = []

    def __len__(self) -> int:
        return len(self.begins)

    def add(self, begin: float, end: float, outcome: int, name: str) -> None:
        """One more; an end before its begin, as clocks of two machines can tell it, is at it."""
        self.begins.append(begin)
        self.ends.append(max(begin, end))
        self.outcomes.append(outcome)
        if len(self) <= MAX_NAMED:
            self.names.append(name)
        else:
            self.names.clear()

    def in_order(self) -> list[int]:
        """Their numbers, by begin."""
        return sorted(
            range(len(self)), key=lambda number: (self.begins[number], self.ends[number], self.outcomes[number])
        )

    def running(self, low: float, high: float, buckets: int = 240) -> list[tuple[float, float]]:
        """(middle of a bucket, how many ran in it in the mean) between two times."""
        width = (high - low) / buckets
        if width <= 0:
            return []
        whole, part = [0.0] * (buckets + 1), [0.0] * (buckets + 1)
        for begin, end in zip(self.begins, self.ends, strict=True):
            first, last = (min(buckets, max(0.0, (time - low) / width)) for time in (begin, end))
            if int(first) == int(last):
                part[int(first)] += last - first
                continue
            part[int(first)] += int(first) + 1 - first
            part[int(last)] += last - int(last)
            whole[int(first) + 1] += 1
            whole[int(last)] -= 1
        points, sum_ = [], 0.0
        for bucket in range(buckets):
            sum_ += whole[bucket]
            points.append((low + (bucket + 0.5) * width, sum_ + part[bucket]))
        return points
