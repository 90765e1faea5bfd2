"""Structured logs of the orchestrator, through the standard library's logging: a program that uses the SDK decides where they go."""

import logging
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
