"""When a batch will be done: from what has ended lately, how long items took, and how long those that run have run
already.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from orchestrator.batches.histogram import LogHistogram, bucket_of, middle_of

WINDOW_S = 600.0
MAX_ENDS = 50
ENOUGH_ENDS = 5
QUIET_S = 30.0
"""After so long without an end and with nothing running nobody works the batch."""


def estimate_arrival(
    now: float, total: int, queued: int, ages: Sequence[float], lengths: LogHistogram, ends: Iterable[float]
) -> float | None:
    """Seconds until all have ended, never negative; None: not enough is known.

    `ages`: seconds that each running item has run. `lengths`: of those that have ended. `ends`: when the last MAX_ENDS
    of them did. The longer one of two estimates counts: by the rate of the last ends, in which silence counts, and by
    lengths.
    """
    if queued + len(ages) == 0:
        return 0.0
    if lengths.count < min(ENOUGH_ENDS, max(1, total // 2)):
        return None
    recent = sorted(end for end in ends if now - WINDOW_S < end <= now)
    estimates = []
    if len(recent) >= ENOUGH_ENDS and (ages or now - recent[-1] < QUIET_S):
        estimates.append((queued + len(ages)) * (now - recent[0]) / (len(recent) - 1))
    if ages:
        estimates.append(_by_lengths(queued, ages, lengths))
    return max(estimates, default=None)


def _by_lengths(queued: int, ages: Sequence[float], lengths: LogHistogram) -> float:
    """All that is left, shared among as many as run now; and no sooner than the one of them that will take longest."""
    counted = Counter(bucket_of(max(0.0, age)) for age in ages)
    table = LifeTable(lengths, counted)
    rests = {bucket: table.rest(middle_of(bucket)) for bucket in counted}
    left = queued * table.rest(0.0) + sum(rests[bucket] * count for bucket, count in counted.items())
    return max(left / len(ages), *rests.values())


class LifeTable:
    """How long items take when some have not ended yet: those have taken at least their age. Without them the quick
    ones, which end first, would make all look quick. `ages`: how many of a bucket's age are running."""

    def __init__(self, ended: LogHistogram, ages: Counter[int]) -> None:
        at_risk, survival = ended.count + ages.total(), 1.0
        self._steps: list[tuple[float, float]] = []
        """(time, share that takes longer), by time."""
        for bucket in sorted({*ended.buckets, *ages}):
            deaths, censored = ended.buckets.get(bucket, 0), ages[bucket]
            if deaths:
                survival *= 1 - deaths / (at_risk - censored / 2)
            at_risk -= deaths + censored
            self._steps.append((middle_of(bucket), max(0.0, survival)))

    def rest(self, age: float) -> float:
        """What one of this age is expected to take yet. Older than all that ended: as long again as it has run."""
        share, area, since = 1.0, 0.0, age
        alive = next((survival for time, survival in reversed(self._steps) if time <= age), 1.0)
        if alive <= 1e-9 or not self._steps:
            return age
        share = alive
        for time, survival in self._steps:
            if time > age:
                area += share * (time - since)
                share, since = survival, time
        return (area + share * since) / alive
