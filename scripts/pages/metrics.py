"""Build docs/metrics.md from contract/metrics.py: every metric with its type, labels and meaning."""

from toolcrew.contract.metrics import METRICS, Metric

PAGE = "metrics.md"
INTRO = """\
# Metrics

Generated from `contract/metrics.py` by `scripts/reference.py`. [Observe](observe.md#metrics) says how to scrape them.
"""


def build_page() -> str:
    """Return the whole page: counters and histograms, then gauges."""
    summed = [metric for metric in METRICS.values() if metric.kind != "gauge"]
    gauges = [metric for metric in METRICS.values() if metric.kind == "gauge"]
    return f"{INTRO}\n## Counters and histograms\n\n{_table(summed)}\n## Gauges\n\n{_table(gauges)}"


def _table(metrics: list[Metric]) -> str:
    head = "| metric | type | labels | means | look at it |\n|---|---|---|---|---|\n"
    return head + "".join(_row(metric) for metric in metrics)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {metric.check_when} |\n"
