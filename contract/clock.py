"""Timestamps for people to read."""

from datetime import UTC, datetime
from typing import Literal


def format_instant(at: float, unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Return Unix seconds as ISO 8601 in UTC, with the precision of `unit`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=unit).replace("+00:00", "Z")
