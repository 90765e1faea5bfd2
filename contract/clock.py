"""Timestamps for people to read."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import PlainSerializer, WithJsonSchema


def format_instant(at: float, unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Return Unix seconds as ISO 8601 in UTC, with the precision of `unit`."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=unit).replace("+00:00", "Z")


Instant = Annotated[
    float,
    PlainSerializer(lambda at: format_instant(at), when_used="json-unless-none"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Unix seconds in a record that lists show. Its JSON is ISO 8601 in UTC."""
