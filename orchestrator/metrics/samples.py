"""Samples as text: the Prometheus format 0.0.4, or OpenMetrics 1.0."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from contract.metrics import BUCKET, COUNT, METRICS, SUM, Metric

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

MAX_VALUE = 1e18
"""What a worker's report says may be any whole number."""
Labels = tuple[str, ...]
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass
class Samples:
    """What is to be told, by metric and label values. Of a histogram: its parts."""

    numbers: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))
    histograms: dict[str, dict[Labels, dict[str, float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))

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
    line = f"{metric.name}{_template(metric.labels)}"
    yield from [line % (*map(_escaped, labels), _number(value)) for labels, value in sorted(known.items())]


def _histogram(metric: Metric, labels: Labels, parts: Mapping[str, float]) -> Iterable[str]:
    told, so_far = tuple(map(_escaped, labels)), 0.0
    bucket = f"{metric.name}_bucket{_template((*metric.labels, 'le'))}"
    for bound in metric.buckets:
        so_far += parts.get(f"{BUCKET}{bound:g}", 0.0)
        yield bucket % (*told, repr(bound), _number(so_far))
    count = max(so_far, parts.get(COUNT, 0.0))
    yield bucket % (*told, "+Inf", _number(count))
    for part, value in (("sum", parts.get(SUM, 0.0)), ("count", count)):
        yield f"{metric.name}_{part}{_template(metric.labels)}" % (*told, _number(value))


def _template(names: Labels) -> str:
    """For `%` with the label values, escaped, and the number."""
    return "{" + ",".join(f'{name}="%s"' for name in names) + "} %s" if names else " %s"


@lru_cache(maxsize=16_384)
def _escaped(value: str) -> str:
    return value.translate(_ESCAPES)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
