"""Structured logs of the worker side: our own events and those of libraries, on stderr, one event a line."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import structlog
from structlog.contextvars import bound_contextvars

from contract.calls import ToolCall, ToolContext
from contract.masking import Masker, secrets_of_settings
from telemetry.log_lines import LogLines, RecordLines
from workers.settings import (
    EgressSettings,
    SandboxdSettings,
    WorkerSettings,
    secrets_of_environment,
)

log = structlog.get_logger(__name__)

# These loggers repeat what our own events say about every call.
_REPEATING = ("celery.worker.strategy", "celery.app.trace")


def configure_logging(
    service: str, settings: WorkerSettings | SandboxdSettings | EgressSettings, level: str | None = None
) -> None:
    """Configure the whole process. `service`: a field of all its lines; `level`: in place of the settings'."""
    fixed = {"host": settings.host} if isinstance(settings, WorkerSettings) else {}
    lines = _build_lines(service, secrets_of_settings(settings), fixed)
    least = logging.getLevelNamesMapping()[level or settings.log_level]

    def to_line(_: object, method: str, fields: MutableMapping[str, Any]) -> str:
        if method == "exception":
            fields.setdefault("exc_info", True)
        return lines.build("error" if method == "exception" else method, str(fields.pop("event")), time.time(), fields)

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, to_line],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )
    _take_library_records(RecordLines(lines), least)
    _log_uncaught()


def log_not_started(service: str, error: Exception) -> None:
    """Log why a process could not start. It may have no settings to configure logging with."""
    lines = _build_lines(service, {}, {})
    _write(lines.build("critical", "not_started", time.time(), {"error": str(error)}))


def bound_to_call(call: ToolCall, context: ToolContext) -> AbstractContextManager[Any]:
    """Give all log lines of the block the call's names; threads that it starts do not have them."""
    names = {
        "tenant": context.tenant,
        "session": context.session,
        "run": context.run,
        "call": call.id,
        "tool": call.name,
    }
    return bound_contextvars(**{name: value for name, value in names.items() if value is not None})


def bound_to_session(name: object) -> AbstractContextManager[Any]:
    """Do the same for a session as sandboxd names it, `tenant:session`. Any other value binds nothing."""
    tenant, colon, session = name.partition(":") if isinstance(name, str) else ("", "", "")
    return bound_contextvars(tenant=tenant, session=session) if colon else bound_contextvars()


class _Stderr:
    """Receives finished lines from structlog."""

    def msg(self, line: str) -> None:
        _write(line)

    debug = info = warning = error = critical = exception = msg


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _write(self.format(record))


def _write(line: str) -> None:
    """Write at once and without a lock: processes share this stderr, and one that was just forked must not wait for a
    thread that it does not have.
    """
    data = f"{line}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # no process reads any more: no reason for calls to fail
        while data:
            data = data[os.write(2, data) :]


def _build_lines(service: str, secrets: Mapping[str, str], fixed: Mapping[str, str]) -> LogLines:
    masker = Masker({**secrets_of_environment(), **secrets})
    return LogLines(masker, {"service": service, **fixed}, is_console=sys.stderr.isatty())


def _take_library_records(formatter: logging.Formatter, least: int) -> None:
    handler = _Handler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(least if least <= logging.DEBUG else max(least, logging.WARNING))
    for package in ("celery", "store"):
        logging.getLogger(package).setLevel(least)
    for name in _REPEATING:
        logging.getLogger(name).setLevel(least if least <= logging.DEBUG else max(least, logging.WARNING))
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
