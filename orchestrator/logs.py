"""Structured logs of the orchestrator, through the standard library's logging: a program that uses the SDK decides where they go."""

import logging
import sys
import time
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """A logger of events as key=value. Without any configuration warnings go to stderr, as the standard library does it."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def configure_logging() -> None:
    """For a service: what the orchestrator's parts have to say goes to stderr, one event a line, as the workers write it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger = logging.getLogger("orchestrator")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Lines(logging.Formatter):
    """Instant and level before the event."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return f"timestamp={self.formatTime(record)} level={record.levelname.lower()} {super().format(record)}"
