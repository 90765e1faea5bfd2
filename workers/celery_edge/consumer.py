"""A Celery consumer whose tasks may come while it works, and which sends the events of its tasks in batches.

A message for each event is more than half of what its main thread does otherwise.
"""

import time
from collections.abc import Callable
from typing import Any

from celery.app.registry import TaskRegistry
from celery.app.trace import build_tracer
from celery.worker.consumer import Consumer

FLUSH_AFTER_S = 0.1
"""The greatest age of the first event of a batch."""
MAX_BATCH = 500
FORGOTTEN_S = 1.0
"""A batch that is late by so much was lost with a broken connection."""


class LiveTasks(TaskRegistry):
    """Tasks of an app that may be added while it runs. `find` adds the task of a name, or does nothing; then a missing
    name raises NotRegistered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.find: Callable[[str], None] = lambda name: None

    def __missing__(self, name: str) -> Any:
        self.find(name)
        if name not in self:
            raise self.NotRegistered(name)
        task = self[name]
        # A process of the pool does this at its start for the tasks that it knows then.
        task.__trace__ = build_tracer(name, task, task.app.loader, app=task.app)
        return task


class LiveStrategies(dict[str, Any]):
    """How a consumer passes on a message, by its task, also for tasks that were added later. Raises KeyError for
    unknown tasks.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self._consumer = consumer

    def __missing__(self, name: str) -> Any:
        strategy = self[name] = self._consumer.app.tasks[name].start_strategy(self._consumer.app, self._consumer)
        return strategy


class BatchingConsumer(Consumer):
    """Celery's own sends events with every turn of its loop, and knows only the tasks that there were at its start."""

    hub: Any
    event_dispatcher: Any
    _flush_events: Any
    _due_at = 0.0

    def Strategies(self) -> LiveStrategies:  # type: ignore[override]  # where Celery has the class of a dictionary
        return LiveStrategies(self)

    def on_send_event_buffered(self) -> None:  # type: ignore[override]  # Celery's stubs expect what it gives by accident
        """Called with every event, by the thread that has ended a call."""
        # Celery makes a new dispatcher, with its own limit, for every connection.
        self.event_dispatcher.buffer_limit = MAX_BATCH
        now = time.monotonic()
        if self.hub and (self._due_at == 0.0 or now > self._due_at + FORGOTTEN_S):
            self._due_at = now + FLUSH_AFTER_S
            # Only the loop's own thread may set its timers.
            self.hub.call_soon(self._wait)

    def shutdown(self) -> None:
        self._flush()
        super().shutdown()

    def _wait(self) -> None:
        self.hub.call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._due_at = 0.0
        self._flush_events()
