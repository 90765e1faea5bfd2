#!/usr/bin/env python3
"""Keeps docs/log-events.md: every event that the sources log, with its levels, who says it and what it carries, read
from the code.

    .venv/bin/python scripts/log_events.py [--check]

What an event means, and what to do then, stands in the page's last column and is kept; a new event gets a row whose
last column is to be written. With --check nothing is written: exit status 1, and a line for each, when the page is not
what the sources say, when a meaning is missing, or when an event is no literal in snake_case.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "log-events.md"
PACKAGES = ("contract", "telemetry", "store", "orchestrator", "workers")
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
}
UNWRITTEN = "to be written"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
ROW = re.compile(r"^\| `(?P<event>[^`]+)` \|.*\| (?P<meaning>[^|]*) \|$", re.MULTILINE)
INTRO = """\
# What the logs say

Every event of every process, made from the sources by `scripts/log_events.py`; what an event means and what to do then is written here by
hand. Format and common fields: [Observe](observe.md#logs). The fields are those of the event itself; `tenant`, `batch`, `run`, `session`, `call` and
`tool` come with it wherever they are known.

| event | level | who | fields | what it means, and what to do |
|---|---|---|---|---|
"""


@dataclass
class Event:
    """One name, wherever it is said."""

    levels: set[str] = field(default_factory=set)
    who: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def name_speaker(path: str) -> str:
    """The process that a file's events come from."""
    for folder, speaker in (
        ("workers/logs.py", "every worker-side process"),
        ("orchestrator/logs.py", "every orchestrator-side process"),
        ("workers/sandboxd/", "sandboxd"),
        ("workers/egress/", "egress"),
        ("workers/web", "web-worker"),
        ("workers/custom/", "web-worker"),
        ("workers/", "worker"),
        ("orchestrator/api/", "api"),
        ("orchestrator/http/", "api, mcp"),
        ("orchestrator/mcp/", "mcp"),
        ("orchestrator/", "orchestrator"),
    ):
        if path.startswith(folder):
            return speaker
    return "every process"


def find_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, int]]:
    """Calls that log, their level, and which argument is the event."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Duty":
            # A duty of a worker (workers/duties.py) logs its failures under the event that it was given.
            yield node, "warning", 3
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = ast.unparse(node.func.value), node.func.attr
        if method in LEVELS and re.search(r"(^|[._])log(ger)?$", owner):
            yield node, LEVELS[method], 0
        elif method == "build" and owner == "lines" and len(node.args) == 4 and isinstance(node.args[1], ast.Constant):
            yield node, str(getattr(node.args[0], "value", "")), 1


def read_events(root: Path = ROOT) -> tuple[dict[str, Event], list[str]]:
    """Event -> what the sources say of it; and complaints about calls that are no such event."""
    # What libraries say has one name, which their logger's name tells apart.
    events = {
        "library_said": Event(
            {"debug", "info", "warning", "error", "critical"}, {"every process"}, {"logger", "message"}
        )
    }
    complaints = []
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for call, level, at in find_calls(ast.parse(path.read_text())):
            said = call.args[at] if len(call.args) > at else None
            if not isinstance(said, ast.Constant) or not isinstance(said.value, str) or not NAME.fullmatch(said.value):
                complaints.append(
                    f"{name}:{call.lineno}: log an event's name in snake_case, as a literal, and the rest as its fields"
                )
                continue
            event = events.setdefault(said.value, Event())
            event.levels.add(level)
            event.who.add(name_speaker(name))
            is_duty = isinstance(call.func, ast.Name)
            event.fields |= (
                {"error"} if is_duty else {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            )
    return events, complaints


def read_meanings(page: str) -> dict[str, str]:
    """Event -> what stands in the last column of a page."""
    return {row["event"]: row["meaning"] for row in ROW.finditer(page)}


def build_page(events: dict[str, Event], meanings: dict[str, str]) -> str:
    """The whole page."""
    order = list(dict.fromkeys(LEVELS.values()))
    rows = []
    for name, event in sorted(events.items()):
        levels = ", ".join(sorted(event.levels, key=order.index))
        fields = ", ".join(f"`{one}`" for one in sorted(event.fields))
        rows.append(
            f"| `{name}` | {levels} | {', '.join(sorted(event.who))} | {fields} | {meanings.get(name, UNWRITTEN)} |\n"
        )
    return INTRO + "".join(rows)


def main() -> int:
    events, complaints = read_events()
    page = PAGE.read_text() if PAGE.exists() else ""
    meanings = read_meanings(page)
    whole = build_page(events, meanings)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(whole)
    elif whole != page:
        complaints.append("docs/log-events.md is not what the sources say: run scripts/log_events.py")
    complaints += [
        f"docs/log-events.md: write what {name} means, and what to do"
        for name in events
        if UNWRITTEN in meanings.get(name, UNWRITTEN)
    ]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
