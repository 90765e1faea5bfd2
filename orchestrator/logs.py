"""Structured logs of the orchestrator, through the standard library's logging: a program that uses the SDK decides where they go."""

import logging
import sys
import threading
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any

import structlog

from contract.log_lines import LogFormat, LogLines
from contract.log_records import RecordLines, Said
from contract.masking import Masker, secrets_of_settings
from orchestrator.settings import OrchestratorSettings, secrets_of_environment

bound = structlog.contextvars.bound_contextvars
"""`with bound(run=..., tenant=...):` what is said in there, and in tasks begun there, carries these fields."""


def get_logger(name: str) -> Any:
    """A logger of events as key=value. Without any configuration warnings go to stderr, as the standard library does it."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def configure_logging(settings: OrchestratorSettings, service: str = "orchestrator") -> None:
    """For a service: what the orchestrator's parts have to say goes to stderr, one event a line, as the workers write it; so what libraries
    warn of, Python's own warnings, and what nobody has caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordLines(build_lines(settings.log_format, service, secrets_of_settings(settings))))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING)
    logging.getLogger("orchestrator").setLevel(settings.log_level)
    logging.captureWarnings(True)
    _say_uncaught()


def build_lines(form: LogFormat | None, service: str, secrets: Mapping[str, str]) -> LogLines:
    """Lines for this process's stderr. `form` None: for a person when that is a terminal, else for programs. `secrets`: beside those of the
    environment, name -> value."""
    is_terminal = sys.stderr.isatty()
    masker = Masker({**secrets_of_environment(), **secrets})
    return LogLines(form or ("console" if is_terminal else "json"), masker, {"service": service}, is_colored=is_terminal)


def _to_record(_: object, method: str, told: MutableMapping[str, Any]) -> tuple[tuple[Said], dict[str, Any]]:
    """The last processor: what the record is made of."""
    if method == "exception":
        told.setdefault("exc_info", True)
    # Now: by the time the record is formatted another may be handled.
    error = told.pop("exc_info", None)
    if error:
        told["exc_info"] = error if isinstance(error, BaseException | tuple) else sys.exc_info()
    return (Said(str(told.pop("event")), told),), {}


def _say_uncaught() -> None:
    log = get_logger(__name__)

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("process_failed", exc_info=error)

    sys.excepthook = say
    threading.excepthook = lambda told: log.critical("thread_failed", exc_info=told.exc_value)
