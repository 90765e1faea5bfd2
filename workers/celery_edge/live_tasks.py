"""Tasks of a Celery app that come while it works: a name that is not known yet is asked for, in the process that consumes and in those that run calls."""

from collections.abc import Callable
from typing import Any

from celery.app.registry import TaskRegistry
from celery.app.trace import build_tracer


class LiveTasks(TaskRegistry):
    """`find`: makes the task of a name and puts it here, or does nothing. Whoever looks up a name that there is not after that gets NotRegistered."""

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
    """How a consumer hands on a message, by its task: of the app's tasks, whenever they came. Raises KeyError for others."""

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self._consumer = consumer

    def __missing__(self, name: str) -> Any:
        strategy = self[name] = self._consumer.app.tasks[name].start_strategy(self._consumer.app, self._consumer)
        return strategy
