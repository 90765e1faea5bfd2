#!/usr/bin/env python3
"""Write what is generated: the pages of docs/ (settings, commands, errors, HTTP API, tools, metrics, log events,
programs), the synchronous client of the HTTP API, and, where npm is installed, the TypeScript client.

    .venv/bin/python scripts/reference.py [--check]

With --check the script writes nothing. It exits with status 1 if a page is out of date or a text that people write is
missing, and prints a line for each.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import typescript_client  # noqa: E402
from scripts.pages import (  # noqa: E402
    commands,
    errors,
    http_api,
    log_events,
    metrics,
    programs,
    settings,
    sync_client,
    tools,
)

PAGES = (settings, commands, errors, http_api, tools, metrics, log_events, programs)


def main(arguments: list[str]) -> int:
    problems = []
    files = {ROOT / "docs" / page.PAGE: page.build_page for page in PAGES}
    sources = {target: partial(sync_client.build_source, target) for target in sync_client.TARGETS}
    for path, build in {**files, **sources}.items():
        text = build()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            problems.append(f"{path.relative_to(ROOT)} is out of date: run .venv/bin/python scripts/reference.py")
    if "--check" not in arguments and shutil.which("npm"):
        typescript_client.main([])
    problems += log_events.find_problems()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
