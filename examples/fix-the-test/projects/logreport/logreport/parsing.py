"""Lines such as `2024-05-01T10:00:00 WARNING db: slow query: 1200 ms`."""

from dataclasses import dataclass
from datetime import datetime

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True)
class Entry:
    at: datetime
    level: str
    source: str
    message: str


def parse_line(line: str) -> Entry:
    """Raises ValueError for a line of another form."""
    stamp, level, rest = line.rstrip("\n").split(" ", 2)
    if level not in LEVELS:
        raise ValueError(f"{level!r} is no level")
    source, message = rest.split(": ")
    return Entry(datetime.fromisoformat(stamp), level, source, message)
