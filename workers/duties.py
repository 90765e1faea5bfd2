"""Periodic duties of a worker."""

import logging
import threading
from collections.abc import Callable

import structlog

from toolcrew.contract.errors import OperatorError, ToolFailure

log = structlog.get_logger(__name__)


class Duty:
    """Runs a function every `every_s` seconds until `stop` is set.

    Each duty has its own thread, so a blocked duty delays no other duty. `run` returns True when the duty is complete;
    it then never runs again. If `run` raises OperatorError or ToolFailure, the event `failure` is logged with the
    error, and `run` is called again after `retry_s`. With `is_first_at_once` the first run does not wait for `every_s`.
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
        """Run now. If a run is in progress, run once more after it."""
        self._soon.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread. The duty must be complete or stopped."""
        self._soon.set()
        self._thread.join(timeout_s)

    def _repeat(self) -> None:
        pause_s = self._every_s
        while True:
            self._soon.wait(pause_s)
            # Clear the event before the run: a `run_soon` during the run then causes another run.
            self._soon.clear()
            if self._stop.is_set():
                return
            try:
                if self._run() is True:
                    return
                pause_s = self._every_s
            except (OperatorError, ToolFailure) as error:
                # The event's name is a literal at the definition of the duty (scripts/log_events.py).
                log.log(logging.WARNING, self._failure, error=str(error))
                pause_s = self._retry_s
