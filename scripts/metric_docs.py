#!/usr/bin/env python3
"""Writes the tables of docs/metrics.md from contract/metrics.py, so that the page has every metric.

    .venv/bin/python scripts/metric_docs.py [--check]

With --check nothing is written: exit status 1 when the page is not what the metrics say.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from contract.metrics import METRICS, Metric  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- made by scripts/metric_docs.py -->\n", "<!-- end -->\n"


def build_tables() -> str:
    """Counters and histograms, then gauges."""
    summed = [metric for metric in METRICS.values() if metric.kind != "gauge"]
    gauges = [metric for metric in METRICS.values() if metric.kind == "gauge"]
    return f"## What is counted\n\n{_table(summed)}\n## What is now\n\n{_table(gauges)}"


def _table(metrics: list[Metric]) -> str:
    head = "| metric | type | labels | means | look at it |\n|---|---|---|---|---|\n"
    return head + "".join(_row(metric) for metric in metrics)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {metric.look} |\n"


def build_page(page: str) -> str:
    """The page with the tables of now. Raises ValueError when their marks are gone."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(
            f"docs/metrics.md has lost the lines {BEGIN.strip()} and {END.strip()}: put them back around its tables"
        )
    return f"{before}{BEGIN}\n{build_tables()}\n{END}{after}"


def main() -> int:
    page = PAGE.read_text()
    wanted = build_page(page)
    if page == wanted:
        return 0
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
        return 0
    print("docs/metrics.md is not what the metrics say: run .venv/bin/python scripts/metric_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
