"""Reads the state of a Celery worker's parent process, and ends it from within."""

import json
import os
import threading
from collections.abc import Callable
from typing import Any

from celery.signals import worker_shutting_down
from celery.worker import state

EXIT_RESTART = 75
"""The exit code of a worker that must be started again: its name was given up, or its sandboxd is another one."""


def count_running() -> int:
    """Return how many calls the processes or threads of the pool have begun."""
    return len(state.active_requests)


def find_sessions_at_work() -> set[str]:
    """Return the sessions, `<tenant>:<session>`, with a call that was taken from the queue and has not ended; claimed
    or not.
    """
    # One step of the interpreter: the main thread changes it meanwhile.
    requests = list(state.requests.values())
    return {name for name in (parse_session_of(request.kwargs) for request in requests) if name is not None}


def parse_session_of(arguments: Any) -> str | None:
    """Return the session of a task's call, by the task's arguments; None without one. Its signature is not checked
    yet.
    """
    try:
        context = json.loads(arguments["envelope"].split(".", 3)[3])["context"]
        return f"{context['tenant']}:{context['session']}" if context.get("session") else None
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def end_worker(code: int, *, within_s: float | None = None) -> None:
    """Take no more calls, let those that run end, and end the process with `code`; after `within_s` whatever still
    runs.
    """
    if within_s is not None:
        # Storing a result is retried while Redis is away, and a hung call does not end: neither may delay this.
        timer = threading.Timer(within_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    state.should_stop = code  # type: ignore[assignment]  # Celery: None, or the exit code


def on_stopping(callback: Callable[[], None]) -> None:
    """Call `callback` when the worker begins to end. It may run in a signal handler, so it must not take a lock."""

    def handle(**_: Any) -> None:
        callback()

    worker_shutting_down.connect(handle, weak=False)
