"""Structured logs of the worker side. toolcrew's events and the records of libraries go to stderr, one event per
line.
"""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

import structlog

from toolcrew.contract.masking import Masker, secrets_of_settings
from toolcrew.contract.settings import (
    EgressSettings,
    SandboxdSettings,
    StreamGatewaySettings,
    WorkerSettings,
    secrets_of_environment,
)
from toolcrew.telemetry.log_lines import LogLines, RecordLines, StderrLogger, write_line

log = structlog.get_logger(__name__)

# For every call, these loggers repeat what our own log events say.
_REPEATING = ("celery.worker.strategy", "celery.app.trace")


def configure_logging(
    service: str,
    settings: WorkerSettings | SandboxdSettings | EgressSettings | StreamGatewaySettings,
    level: str | None = None,
) -> None:
    """Configure logging for the whole process. `service` is a field of all lines.

    `level` replaces the level of the settings.
    """
    fixed = {"host": settings.host} if isinstance(settings, WorkerSettings | StreamGatewaySettings) else {}
    lines = _build_lines(service, secrets_of_settings(settings), fixed)
    min_level = logging.getLevelNamesMapping()[level or settings.log_level]

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, lines.process],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=lambda *_: StderrLogger(),
        cache_logger_on_first_use=True,
    )
    _take_library_records(RecordLines(lines), min_level)
    _log_uncaught()


def log_not_started(service: str, error: Exception) -> None:
    """Log why a process could not start. The process may have no settings to configure logging with."""
    lines = _build_lines(service, {}, {})
    write_line(lines.build("critical", "not_started", time.time(), {"error": str(error)}))


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write_line(self.format(record))


def _build_lines(service: str, secrets: Mapping[str, str], fixed: Mapping[str, str]) -> LogLines:
    masker = Masker({**secrets_of_environment(), **secrets})
    return LogLines(masker, {"service": service, **fixed}, is_console=sys.stderr.isatty())


def _take_library_records(formatter: logging.Formatter, min_level: int) -> None:
    handler = _Handler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(min_level if min_level <= logging.DEBUG else max(min_level, logging.WARNING))
    for package in ("celery", "toolcrew"):
        logging.getLogger(package).setLevel(min_level)
    for name in _REPEATING:
        logging.getLogger(name).setLevel(min_level if min_level <= logging.DEBUG else max(min_level, logging.WARNING))
    logging.captureWarnings(True)


def _log_uncaught() -> None:
    def log_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("process_failed", exc_info=error)

    sys.excepthook = log_error
    threading.excepthook = lambda failure: log.critical(
        "thread_failed", thread=failure.thread.name if failure.thread else "", exc_info=failure.exc_value
    )
