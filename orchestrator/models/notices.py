"""Notices about the requests of a run to its model: what they wait for, and which endpoint answers instead.

A context variable holds the listener, because runs share the models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

OnNotice = Callable[[str], object]


@dataclass(frozen=True)
class _Listener:
    notify: OnNotice
    waits: set[str] = field(default_factory=set)
    """Sentences about waits that this listener has already received."""


_current: ContextVar[_Listener | None] = ContextVar("model_notices", default=None)


@contextmanager
def report_notices(listener: OnNotice) -> Iterator[None]:
    """Context manager: call `listener` with a sentence for each notice about requests to models, of this task and of
    tasks that start in the block.
    """
    token = _current.set(_Listener(listener))
    try:
        yield
    finally:
        _current.reset(token)


def notify(message: str) -> None:
    """Pass a notice to the listener of the current run, if there is one."""
    if (listener := _current.get()) is not None:
        listener.notify(message)


def notify_of_wait(model: str, cause: str) -> None:
    """Report why a request waits. A run gets only one notice for each cause."""
    message = f"the run waits for the model {model}: {cause}"
    if (listener := _current.get()) is not None and message not in listener.waits:
        listener.waits.add(message)
        listener.notify(message)
