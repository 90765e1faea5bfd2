#!/usr/bin/env python3
"""Write every generated page of docs/: settings, commands, errors, HTTP API, tools, metrics, log events.

    .venv/bin/python scripts/reference.py [--check]

With --check the script writes nothing. It exits with status 1 if a page is out of date, and prints a line for each
such page.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCRIPTS = ("setting_docs", "command_docs", "error_docs", "http_docs", "tool_docs", "metric_docs", "log_events")


def main() -> int:
    # Each script reads --check from the command line.
    return max(int(runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["main"]()) for name in SCRIPTS)


if __name__ == "__main__":
    sys.exit(main())
