"""Values of one scrape, as a collector that prometheus_client renders."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from toolcrew.contract.metrics import BUCKET, COUNT, METRICS, SUM, Metric

TEXT = exposition.CONTENT_TYPE_PLAIN_0_0_4
OPEN_METRICS = openmetrics.CONTENT_TYPE_LATEST

MAX_VALUE = 1e18
"""Limit of a value. A worker may report any integer."""
Labels = tuple[str, ...]


@dataclass
class Samples(Collector):
    """Values of the metrics, by metric and label values. A histogram consists of parts (contract/metrics.py)."""

    numbers: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))
    histograms: dict[str, dict[Labels, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.numbers[metric.name][labels] = min(value, MAX_VALUE)

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Add `value` to the current value of the metric with these label values."""
        values = self.numbers[metric.name]
        values[labels] = values.get(labels, 0.0) + min(value, MAX_VALUE)

    def add_part(self, metric: Metric, part: str, labels: Labels, value: float) -> None:
        """Add one field of the hash of sums. Values of fields with the same labels are added, because another release
        may have written the labels in another form.
        """
        if metric.kind == "histogram":
            parts = self.histograms[metric.name][labels]
            parts[part] = parts.get(part, 0.0) + value
        else:
            self.add(metric, value, *labels)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics in their order, also those without a value."""
        for metric in METRICS.values():
            if metric.kind == "histogram":
                yield self._histogram(metric)
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            values: dict[Labels, float] = {(value,): 0.0 for value in metric.values}
            if not metric.labels and metric.kind == "counter":
                values[()] = 0.0
            for labels, value in sorted((values | self.numbers.get(metric.name, {})).items()):
                family.add_metric(labels, value)
            yield family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, parts in sorted(self.histograms.get(metric.name, {}).items()):
            family.add_metric(labels, _buckets(metric, parts), parts.get(SUM, 0.0))
        return family


def render(samples: Samples, *, is_open: bool = False) -> bytes:
    """Return the metrics page in the Prometheus format 0.0.4. `is_open`: use OpenMetrics 1.0."""
    if is_open:
        return bytes(openmetrics.generate_latest(samples))  # type: ignore[no-untyped-call]
    return exposition.generate_latest(samples)


def choose_format(accept: str) -> bool:
    """Return whether a client with this Accept header gets OpenMetrics. The library's own function fails at a version
    that is not a number.
    """
    return "application/openmetrics-text" in accept


def _buckets(metric: Metric, parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the cumulative counts per bound."""
    buckets, so_far = list[tuple[str, float]](), 0.0
    for bound in metric.buckets:
        so_far += parts.get(f"{BUCKET}{bound:g}", 0.0)
        buckets.append((repr(bound), so_far))
    return [*buckets, ("+Inf", max(so_far, parts.get(COUNT, 0.0)))]
