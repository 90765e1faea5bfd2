"""Structured logs through the standard library's logging: the program decides where they go."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from toolcrew.telemetry.log_lines import LogEvent

bound = structlog.contextvars.bound_contextvars
"""`with bound(run=..., tenant=...):` adds these fields to every event that is logged inside, also by tasks that are
started inside.
"""


def get_logger(name: str) -> Any:
    """Return a logger that formats events as key=value. If the program has not configured logging, warnings go to
    stderr, as usual in the standard library.
    """
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _to_record(_: object, method: str, fields: MutableMapping[str, Any]) -> tuple[tuple[LogEvent], dict[str, Any]]:
    """Last processor: return the arguments of the standard library's logging call."""
    if method == "exception":
        fields.setdefault("exc_info", True)
    # Read the exception now: another exception may be active when the record is formatted.
    error = fields.pop("exc_info", None)
    if error:
        fields["exc_info"] = error if isinstance(error, BaseException | tuple) else sys.exc_info()
    return (LogEvent(str(fields.pop("event")), fields),), {}
