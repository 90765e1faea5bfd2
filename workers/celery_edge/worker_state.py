"""What the parent process of a Celery worker knows of its calls, and how it is told to end from within."""

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
    """Calls that a process or thread of the pool has begun."""
    return len(state.active_requests)


def find_sessions_at_work() -> set[str]:
    """Sessions, `<tenant>:<session>`, of which a call was taken from the queue and has not ended; claimed or not."""
    # One step of the interpreter: the main thread goes on changing it.
    requests = list(state.requests.values())
    return {name for name in (parse_session_of(request.kwargs) for request in requests) if name is not None}


def parse_session_of(arguments: Any) -> str | None:
    """Whose call a task is, by its arguments; None for one without a session. Nobody has checked its signature yet."""
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
        # Results are stored again and again while Redis is away, and a hung call has no end: neither holds this up.
        timer = threading.Timer(within_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    state.should_stop = code  # type: ignore[assignment]  # Celery: None, or the exit code


def on_stopping(told: Callable[[], None]) -> None:
    """Have `told` called when the worker begins to end. It may be in a signal handler: nothing that takes a lock."""

    def handle(**_: Any) -> None:
        told()

    worker_shutting_down.connect(handle, weak=False)
