"""Logging of the orchestrator's services. A program that uses the SDK configures its own logging."""

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType

from toolcrew.contract.masking import Masker, secrets_of_settings
from toolcrew.contract.settings import OrchestratorSettings, secrets_of_environment
from toolcrew.telemetry.log_lines import LogLines, RecordLines
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


def configure_logging(settings: OrchestratorSettings, service: str = "orchestrator") -> None:
    """Write the events of a service to stderr, one per line, in the format of the workers. The events include warnings
    of libraries and of Python, and uncaught exceptions.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordLines(build_lines(service, secrets_of_settings(settings))))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING)
    logging.getLogger("toolcrew").setLevel(settings.log_level)
    logging.captureWarnings(True)
    _log_uncaught()


def build_lines(service: str, secrets: Mapping[str, str]) -> LogLines:
    """Return the line format for this process's stderr: text in a terminal, otherwise JSON. `secrets`: name -> value of
    secrets to mask, in addition to those of the environment.
    """
    masker = Masker({**secrets_of_environment(), **secrets})
    return LogLines(masker, {"service": service}, is_console=sys.stderr.isatty())


def _log_uncaught() -> None:
    def log_process_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("process_failed", exc_info=error)

    sys.excepthook = log_process_failure
    threading.excepthook = lambda failure: log.critical("thread_failed", exc_info=failure.exc_value)
