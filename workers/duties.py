"""Periodic duties of a worker."""

import logging
import threading
from collections.abc import Callable

import structlog

from contract.errors import OperatorError, ToolFailure

log = structlog.get_logger(__name__)


class Duty:
    """Runs a function every `every_s` seconds in a thread of its own, so that a duty that hangs holds up no other,
    until `stop` is set.

    `run` returns True when there is nothing more to do, ever. When it raises OperatorError or ToolFailure, `failure` is
    logged with the error, and it runs again after `retry_s`. `is_first_at_once`: the first time without a pause.
    """

    def __init__(
        self,
        name: str,
        every_s: float,
        run: Callable[[], object],
        failure: str,
        stop: threading.Event,
        *,
        retry_s: float | None = None,
        is_first_at_once: bool = False,
    ) -> None:
        self._every_s = every_s
        self._run = run
        self._failure = failure
        self._stop = stop
        self._retry_s = every_s if retry_s is None else retry_s
        self._soon = threading.Event()
        if is_first_at_once:
            self._soon.set()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run_soon(self) -> None:
        """Run now, or again after the present run."""
        self._soon.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of a duty that has nothing more to do, or was stopped."""
        self._soon.set()
        self._thread.join(timeout_s)

    def _repeat(self) -> None:
        pause_s = self._every_s
        while True:
            self._soon.wait(pause_s)
            self._soon.clear()
            if self._stop.is_set():
                return
            try:
                if self._run() is True:
                    return
                pause_s = self._every_s
            except (OperatorError, ToolFailure) as error:
                # The event's name is a literal where the duty is defined (scripts/log_events.py).
                log.log(logging.WARNING, self._failure, error=str(error))
                pause_s = self._retry_s
