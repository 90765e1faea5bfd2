#!/usr/bin/env python3
"""Writes every page of docs/ that is made from the code: settings, commands, errors, HTTP API, tools, metrics, log
events.

    .venv/bin/python scripts/reference.py [--check]

With --check nothing is written: exit status 1, and a line for each page that is not what the code says.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCRIPTS = ("setting_docs", "command_docs", "error_docs", "http_docs", "tool_docs", "metric_docs", "log_events")


def main() -> int:
    # Each reads its own --check from the command line.
    return max(int(runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["main"]()) for name in SCRIPTS)


if __name__ == "__main__":
    sys.exit(main())
