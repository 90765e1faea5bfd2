"""Samples as text: the Prometheus format 0.0.4, or OpenMetrics 1.0."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from contract.metrics import BUCKET, COUNT, METRICS, SUM, Metric

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

SERIES_KEPT = 32_768
MAX_VALUE = 1e18
"""What a worker's report says may be any whole number."""
Labels = tuple[str, ...]
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass
class Samples:
    """What is to be told, by metric and label values. Of a histogram: its parts."""

    numbers: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))
    histograms: dict[str, dict[Labels, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.numbers[metric.name][labels] = min(value, MAX_VALUE)

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """To what is there."""
        known = self.numbers[metric.name]
        known[labels] = known.get(labels, 0.0) + min(value, MAX_VALUE)

    def add_part(self, metric: Metric, part: str, labels: Labels, value: float) -> None:
        """A field of the sums. Other releases may have spelled the labels so that two of them are one."""
        if metric.kind == "histogram":
            parts = self.histograms[metric.name][labels]
            parts[part] = parts.get(part, 0.0) + value
        else:
            self.add(metric, value, *labels)


def render(samples: Samples, *, is_open: bool = False) -> bytes:
    """All metrics in their order, also those of which there is nothing to tell. `is_open`: as OpenMetrics."""
    lines: list[str] = []
    for metric in METRICS.values():
        lines += _family(metric, samples, is_open=is_open)
    if is_open:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def choose_format(accept: str) -> bool:
    """Whether a reader with this Accept header is given OpenMetrics."""
    return "application/openmetrics-text" in accept


def _family(metric: Metric, samples: Samples, *, is_open: bool) -> Iterable[str]:
    family = metric.name.removesuffix("_total") if is_open and metric.kind == "counter" else metric.name
    yield f"# HELP {family} {metric.help}"
    yield f"# TYPE {family} {metric.kind}"
    if metric.kind == "histogram":
        for labels, parts in sorted(samples.histograms.get(metric.name, {}).items()):
            yield from _histogram(metric, labels, parts)
        return
    known: dict[Labels, float] = {(value,): 0.0 for value in metric.values}
    if not metric.labels and metric.kind == "counter":
        known[()] = 0.0
    known |= samples.numbers.get(metric.name, {})
    name = metric.name
    yield from [_series(name, labels) + _number(known[labels]) for labels in sorted(known)]


def _histogram(metric: Metric, labels: Labels, parts: Mapping[str, float]) -> Iterable[str]:
    series, so_far = _histogram_series(metric.name, labels), 0.0
    numbers = list[float]()
    for part in _bucket_parts(metric.name):
        so_far += parts.get(part, 0.0)
        numbers.append(so_far)
    count = max(so_far, parts.get(COUNT, 0.0))
    numbers += count, parts.get(SUM, 0.0), count
    yield from [told + _number(value) for told, value in zip(series, numbers, strict=True)]


@lru_cache(maxsize=SERIES_KEPT)
def _series(name: str, labels: Labels) -> str:
    """A line of a counter or a gauge without its number: most are the same on each page, and putting them together is
    most of its work.
    """
    return _build_series(name, METRICS[name].labels, labels)


@lru_cache(maxsize=SERIES_KEPT // 16)
def _histogram_series(name: str, labels: Labels) -> Sequence[str]:
    """The same of a histogram: its buckets, sum and count."""
    metric = METRICS[name]
    bounds = [*map(repr, metric.buckets), "+Inf"]
    buckets = [_build_series(f"{name}_bucket", (*metric.labels, "le"), (*labels, bound)) for bound in bounds]
    return [*buckets, *(_build_series(f"{name}_{part}", metric.labels, labels) for part in ("sum", "count"))]


def _build_series(name: str, names: Labels, labels: Labels) -> str:
    told = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in zip(names, labels, strict=True))
    return f"{name}{{{told}}} " if told else f"{name} "


@cache
def _bucket_parts(name: str) -> Sequence[str]:
    return [f"{BUCKET}{bound:g}" for bound in METRICS[name].buckets]


def _number(value: float) -> str:
    whole = int(value)
    return str(whole) if value == whole else repr(value)
