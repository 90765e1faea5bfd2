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
"""How old the first event of a batch may be."""
MAX_BATCH = 500
FORGOTTEN_S = 1.0
"""A batch that is late by so much was forgotten with a broken connection."""


class LiveTasks(TaskRegistry):
    """`find`: makes the task of a name and puts it here, or does nothing. Whoever looks up a name that there is not
    after that gets NotRegistered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.find: Callable[[str], None] = lambda name: None

    def __missing__(self, name: str) -> Any:
        self.find(name)
        if name not in self:
            raise self.NotRegistered(name)
        task = self[name]
        # As a process of the pool does it at its start for those that it knows then.
        task.__trace__ = build_tracer(name, task, task.app.loader, app=task.app)
        return task


class LiveStrategies(dict[str, Any]):
    """How a consumer hands on a message, by its task: of the app's tasks, whenever they came. Raises KeyError for
    others.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self._consumer = consumer

    def __missing__(self, name: str) -> Any:
        strategy = self[name] = self._consumer.app.tasks[name].start_strategy(self._consumer.app, self._consumer)
        return strategy


class BatchingConsumer(Consumer):
    """As Celery's own, which sends what there is with every turn of its loop, and knows the tasks that there were at
    its start.
    """

    hub: Any
    event_dispatcher: Any
    _flush_events: Any
    _due_at = 0.0

    def Strategies(self) -> LiveStrategies:  # type: ignore[override]  # where Celery has the class of a dictionary
        return LiveStrategies(self)

    def on_send_event_buffered(self) -> None:  # type: ignore[override]  # Celery's stubs expect what it gives by accident
        """Called with every event, by whichever thread has ended a call."""
        # Made anew with every connection, with a limit of its own.
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
