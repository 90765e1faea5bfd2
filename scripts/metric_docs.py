#!/usr/bin/env python3
"""Write docs/metrics.md from contract/metrics.py: every metric with its type, labels and meaning.

    .venv/bin/python scripts/metric_docs.py [--check]

With --check the script writes nothing. It exits with status 1 if the page is out of date.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.kept_pages import keep_page  # noqa: E402
from toolcrew.contract.metrics import METRICS, Metric  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
INTRO = """\
# Metrics

Generated from `contract/metrics.py` by `scripts/metric_docs.py`. [Observe](observe.md#metrics) says how to scrape them.
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


def main() -> int:
    return keep_page(PAGE, build_page(), "the metrics say")


if __name__ == "__main__":
    sys.exit(main())
