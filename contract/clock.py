"""Timestamps for people to read."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema


def format_instant(at: float, unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Return Unix seconds as ISO 8601 in UTC. `unit`: the smallest unit that the text shows."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=unit).replace("+00:00", "Z")


def parse_instant(text: str) -> float:
    """Return the Unix seconds of an instant in ISO 8601. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()


Instant = Annotated[
    float,
    # A client of the HTTP API reads what a service wrote.
    BeforeValidator(lambda at: parse_instant(at) if isinstance(at, str) else at),
    PlainSerializer(lambda at: format_instant(at), when_used="json-unless-none"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Field type for a time in Unix seconds that is written as ISO 8601 in UTC in JSON."""


def with_instants(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event or a record. Times (`at` and names that end in `_at`) become ISO 8601."""
    return {
        name: format_instant(value, "milliseconds")
        if (name == "at" or name.endswith("_at")) and isinstance(value, int | float)
        else value
        for name, value in fields.items()
    }
