"""What processes have logged, read back as events."""

import json
from pathlib import Path
from typing import Any


def read_events(text: str, event: str | None = None) -> list[dict[str, Any]]:
    """Events of a log of JSON lines, those of one name when it is given. A line that is none fails, but for one that is
    just being written.
    """
    lines = text.split("\n")[:-1]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return [one for one in events if event is None or one["event"] == event]


def read_last_words(text: str) -> str:
    """Why a process says that it did not start."""
    return str(read_events(text, "not_started")[-1]["error"])


def read_log(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    return read_events(path.read_text(errors="replace"), event)
