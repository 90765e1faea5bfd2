"""Where the logs of an orchestrator service go. In a program that uses the SDK, the program decides."""

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType

from contract.masking import Masker, secrets_of_settings
from orchestrator.settings import OrchestratorSettings, secrets_of_environment
from telemetry.log_lines import LogLines, RecordLines
from telemetry.logs import get_logger

log = get_logger(__name__)


def configure_logging(settings: OrchestratorSettings, service: str = "orchestrator") -> None:
    """For a service: what the orchestrator's parts have to say goes to stderr, one event a line, as the workers write
    it; so what libraries warn of, Python's own warnings, and what nobody has caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordLines(build_lines(service, secrets_of_settings(settings))))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if settings.log_level == "DEBUG" else logging.WARNING)
    for package in ("orchestrator", "store"):
        logging.getLogger(package).setLevel(settings.log_level)
    logging.captureWarnings(True)
    _say_uncaught()


def build_lines(service: str, secrets: Mapping[str, str]) -> LogLines:
    """Return the lines for this process's stderr: text in a terminal, else JSON. `secrets`: name -> value, in addition
    to those of the environment.
    """
    masker = Masker({**secrets_of_environment(), **secrets})
    return LogLines(masker, {"service": service}, is_console=sys.stderr.isatty())


def _say_uncaught() -> None:
    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("process_failed", exc_info=error)

    sys.excepthook = say
    threading.excepthook = lambda told: log.critical("thread_failed", exc_info=told.exc_value)
