"""Instants as people read them."""

from datetime import UTC, datetime
from typing import Literal


def format_instant(at: float, unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Unix seconds as everybody is shown them: ISO 8601, UTC, to that unit."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=unit).replace("+00:00", "Z")
