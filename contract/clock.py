"""Timestamps for people to read."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import PlainSerializer, WithJsonSchema


def format_instant(at: float, unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Return Unix seconds as ISO 8601 in UTC. `unit`: the smallest unit that the text shows."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=unit).replace("+00:00", "Z")


Instant = Annotated[
    float,
    PlainSerializer(lambda at: format_instant(at), when_used="json-unless-none"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Field type for a time in Unix seconds that is written as ISO 8601 in UTC in JSON."""
