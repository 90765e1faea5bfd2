"""Read the logs of processes as events."""

import json
from pathlib import Path
from typing import Any


def read_events(text: str, event: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a log of JSON lines; with `event`, only events of that name. An invalid line fails the
    test, unless the line is incomplete at the end.
    """
    lines = text.split("\n")[:-1]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return [one for one in events if event is None or one["event"] == event]


def read_start_error(text: str) -> str:
    """Return the reason that a process gives for a failed start."""
    return str(read_events(text, "not_started")[-1]["error"])


def read_log(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    return read_events(path.read_text(errors="replace"), event)
