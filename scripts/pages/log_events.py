"""Build docs/log-events.md: every log event of the sources with its levels, processes and fields.

The last column, meaning and remedy, is written by hand, and the page keeps it. A new event gets a row without a meaning.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PAGE = "log-events.md"
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contract", "telemetry", "concurrency", "archives", "store", "orchestrator", "workers")
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
# Log events

This page lists every log event of every process. For the format and the common fields, see [Observe](observe.md#logs). The column `fields` has the
event's own fields. Events also have `tenant`, `batch`, `run`, `session`, `call` and `tool` where these are known. `scripts/reference.py` makes the
table from the sources; the last column is written by hand.

| event | level | process | fields | meaning, and what to do |
|---|---|---|---|---|
"""


@dataclass
class Event:
    """All uses of one event name in the sources."""

    levels: set[str] = field(default_factory=set)
    processes: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def find_process(path: str) -> str:
    """Return the process that logs the events of a file."""
    for folder, process in (
        ("workers/logs.py", "every worker-side process"),
        ("orchestrator/logs.py", "every orchestrator-side process"),
        ("workers/sandboxd/", "sandboxd"),
        ("workers/egress/", "egress"),
        ("workers/stream_gateway/", "stream-gateway"),
        ("workers/web", "web-worker"),
        ("workers/custom/", "web-worker"),
        ("workers/", "worker"),
        ("orchestrator/api/", "api"),
        ("orchestrator/http/", "api, mcp"),
        ("orchestrator/mcp/", "mcp"),
        ("orchestrator/", "orchestrator"),
    ):
        if path.startswith(folder):
            return process
    return "every process"


def find_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, int]]:
    """Yield calls that log, their level, and the position of the argument with the event name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Duty":
            # A Duty of a worker (workers/duties.py) logs its failures under the event name in its fourth argument.
            yield node, "warning", 3
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = ast.unparse(node.func.value), node.func.attr
        if method in LEVELS and re.search(r"(^|[._])log(ger)?$", owner):
            yield node, LEVELS[method], 0
        elif method == "build" and owner == "lines" and len(node.args) == 4 and isinstance(node.args[1], ast.Constant):
            yield node, str(getattr(node.args[0], "value", "")), 1


def read_events() -> tuple[dict[str, Event], list[str]]:
    """Return the events by name, and messages about calls without a valid event name."""
    # All messages of libraries have one event name; the field `logger` has the library.
    events = {
        "library_message": Event(
            {"debug", "info", "warning", "error", "critical"}, {"every process"}, {"logger", "message"}
        )
    }
    errors = []
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for call, level, at in find_calls(ast.parse(path.read_text())):
            argument = call.args[at] if len(call.args) > at else None
            if (
                not isinstance(argument, ast.Constant)
                or not isinstance(argument.value, str)
                or not NAME.fullmatch(argument.value)
            ):
                errors.append(
                    f"{name}:{call.lineno}: the event name is not a literal in snake_case. Pass all other data as fields."
                )
                continue
            event = events.setdefault(argument.value, Event())
            event.levels.add(level)
            event.processes.add(find_process(name))
            is_duty = isinstance(call.func, ast.Name)
            event.fields |= (
                {"error"} if is_duty else {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            )
    return events, errors


def _read_meanings() -> dict[str, str]:
    """Return the last column of the page by event."""
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    return {row["event"]: row["meaning"] for row in ROW.finditer(page)}


def build_page() -> str:
    """Return the text of the page."""
    events, _ = read_events()
    meanings = _read_meanings()
    order = list(dict.fromkeys(LEVELS.values()))
    rows = []
    for name, event in sorted(events.items()):
        levels = ", ".join(sorted(event.levels, key=order.index))
        processes = ", ".join(sorted(event.processes))
        fields = ", ".join(f"`{name}`" for name in sorted(event.fields))
        rows.append(f"| `{name}` | {levels} | {processes} | {fields} | {meanings.get(name, UNWRITTEN)} |\n")
    return INTRO + "".join(rows)


def find_problems() -> list[str]:
    """Return a sentence for each event without a meaning and for each call without a valid event name."""
    events, errors = read_events()
    meanings = _read_meanings()
    return errors + [
        f"docs/{PAGE}: the event {name} has no meaning. Write it in the last column."
        for name in events
        if UNWRITTEN in meanings.get(name, UNWRITTEN)
    ]
