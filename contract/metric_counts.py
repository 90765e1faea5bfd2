"""What a process has counted, and the script that adds it to the deployment's sums exactly once, however often it is sent.

A source never sends what it has more: it sends its totals. Redis keeps what it has taken of each (`counted_key`) and adds the difference, both in one step. An
answer that was lost, a worker that was started again beside the same sandboxd, a Redis that lost its last second: each time the next sending is right.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from contract.metrics import BUCKET, COUNT, METRICS, SERIES_MARK, SUM, Metric, clean_label, encode_series, spare_series

COUNTED_TTL_S = 7 * 24 * 3600
"""How long Redis remembers what it has taken of a source that sends nothing."""
MAX_VALUE = 1e15
"""What a single value counts at most: what a model's server tells is nobody's promise."""
_FIELDS_AT_ONCE = 500

# KEYS: the sums, what has been taken of this source. ARGV: how long the latter is kept; then of each number: metric, most series of it, field by which
# its series is known, field, field of the spare series, total, what was taken of it when the source last heard.
ABSORB_LUA = """
for at = 2, #ARGV, 7 do
  local metric, most, mark, field, spare = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local total = tonumber(ARGV[at + 5])
  local more = total - (tonumber(redis.call('HGET', KEYS[2], field) or ARGV[at + 6]) or 0)
  if more > 0 then
    local into = field
    if field ~= spare and redis.call('HEXISTS', KEYS[1], mark) == 0 then
      local series = tonumber(redis.call('HGET', KEYS[1], '#' .. metric) or nil) or 0
      if series >= most then into = spare else redis.call('HSET', KEYS[1], '#' .. metric, string.format('%d', series + 1)) end
      if into == field and field ~= mark then redis.call('HSET', KEYS[1], mark, '0') end
    end
    local added = redis.pcall('HINCRBYFLOAT', KEYS[1], into, string.format('%.17g', more))
    -- What somebody else wrote there is no number.
    if type(added) == 'table' and added.err then redis.call('HSET', KEYS[1], into, string.format('%.17g', more)) end
    redis.call('HSET', KEYS[2], field, ARGV[at + 5])
  end
end
redis.call('EXPIRE', KEYS[2], ARGV[1])
return 1
"""


@dataclass(frozen=True)
class Sending:
    """Some totals on their way. `arguments`: ARGV of the script."""

    totals: Mapping[str, float]
    arguments: tuple[str, ...]


class _Series:
    """The fields of one series."""

    __slots__ = ("buckets", "count", "field", "sum")

    def __init__(self, series: str, metric: Metric) -> None:
        self.field = f"\t{series}"
        self.count, self.sum = f"{COUNT}\t{series}", f"{SUM}\t{series}"
        self.buckets = (*(f"{BUCKET}{bound:g}\t{series}" for bound in metric.buckets), "")


class Counts:
    """Totals since the source began, of as many series as the metrics allow. Not to be shared between threads."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._changed: set[str] = set()
        self._series: dict[tuple[str, ...], _Series] = {}
        self._numbers: dict[str, int] = {}

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """`by` more. What is no sensible number counts as none."""
        self._add(self._find(metric, labels).field, by)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """One value of a histogram."""
        series = self._find(metric, labels)
        self._add(series.count, 1.0)
        self._add(series.sum, value)
        # The last one is of what no bucket has: only the count has it.
        bucket = series.buckets[bisect_left(metric.buckets, value)]
        if bucket:
            self._add(bucket, 1.0)

    def set_total(self, metric: Metric, part: str, total: float, *labels: str) -> None:
        """What another program has counted since it began: the source is that program."""
        field, known = f"{part}{self._find(metric, labels).field}", _sensible(total)
        if known > self._totals.get(field, 0.0):
            self._totals[field] = known
            self._changed.add(field)

    def pending(self) -> Sending | None:
        """What is to be sent next; None when all has been taken."""
        if not self._changed:
            return None
        # A histogram's counts come before its other parts: by them its series is known.
        fields = sorted(self._changed)[:_FIELDS_AT_ONCE]
        totals = {field: self._totals[field] for field in fields}
        arguments = [str(COUNTED_TTL_S)]
        for field, total in totals.items():
            part, series = field.split("\t", 1)
            metric = METRICS[series.split("\t", 1)[0]]
            mark = COUNT if metric.kind == "histogram" else ""
            known = repr(self._taken.get(field, 0.0))
            arguments += [metric.name, str(metric.most), f"{mark}\t{series}", field, f"{part}\t{spare_series(metric)}", repr(total), known]
        return Sending(totals, tuple(arguments))

    def settle(self, sending: Sending) -> None:
        """Redis has taken it."""
        for field, total in sending.totals.items():
            self._taken[field] = total
            if self._totals[field] == total:
                self._changed.discard(field)

    def _add(self, field: str, by: float) -> None:
        more = by if by == 1.0 else _sensible(by)
        if more:
            self._totals[field] = self._totals.get(field, 0.0) + more
            self._changed.add(field)

    def _find(self, metric: Metric, labels: tuple[str, ...]) -> _Series:
        """The series with these label values, or the spare one when this source has too many already."""
        key = (metric.name, *labels)
        found = self._series.get(key)
        if found is None:
            if self._numbers.get(metric.name, 0) >= metric.most:
                return _Series(spare_series(metric), metric)
            self._numbers[metric.name] = self._numbers.get(metric.name, 0) + 1
            found = self._series[key] = _Series(encode_series(metric, [clean_label(label) for label in labels]), metric)
        return found


def is_mark(field: str) -> bool:
    """Whether a field of the sums counts series, and is none itself."""
    return field.startswith(SERIES_MARK)


def _sensible(value: float) -> float:
    return min(max(0.0, value), MAX_VALUE) if math.isfinite(value) else 0.0
