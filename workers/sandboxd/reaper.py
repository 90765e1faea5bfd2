"""Removal of containers without an owner: their sandboxd died, their deadline has passed, or they were never started.

Invariant: a container is removed only if its owner is certainly dead; in doubt the container stays. The labels of a
container and the lease files decide. No other data is used: after kill -9 it may be older than the container.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.factory import SandboxFactory
from toolcrew.workers.sandboxd.leases import Lease
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.runtime.base import (
    LABEL_DEADLINE,
    LABEL_LEASE,
    LABEL_SANDBOXD,
    ListedContainer,
    SandboxRuntime,
)

log = structlog.get_logger(__name__)

NEVER_STARTED_S = 120.0
"""Age in seconds after which a container that was created and not started is removed. A start takes a few seconds."""
DEADLINE_GRACE_S = 60.0
"""Seconds after the deadline of a container until another sandboxd may remove it. Until then the guest ends itself, and
its own sandboxd removes it.
"""


class Reaper:
    """Removes containers without an owner. It examines only the containers of this deployment."""

    def __init__(self, factory: SandboxFactory, records: Records, lease: Lease, deployment: str, name: str) -> None:
        self._factory = factory
        self._records = records
        self._lease = lease
        self._deployment = deployment
        self._name = name

    async def sweep(self) -> int:
        """Remove containers without an owner and return how many. Raises SandboxUnavailable when the engine does not
        answer.
        """
        present: set[str] = set()
        broken_count = removed_count = 0
        for runtime in self._factory.runtimes:
            listed = await runtime.list_sandboxes(self._deployment)
            broken = [
                (container, reason) for container in listed if (reason := self._find_fault(container)) is not None
            ]
            removed = await self._remove(runtime, broken)
            present |= {container.name for container in listed} - removed
            broken_count, removed_count = broken_count + len(broken), removed_count + len(removed)
        if removed_count == broken_count:
            self._lease.forget_dead()
        self._forget_absent(present)
        return removed_count

    def _find_fault(self, container: ListedContainer) -> str | None:
        """Return why the container must be removed, or None when it must stay."""
        if self._factory.knows(container.name):
            return None
        if container.labels.get(LABEL_SANDBOXD) == self._name:
            # Only this process holds the name now, and it did not make the container: an earlier process of this name
            # did.
            return "left by a sandboxd of this name"
        if self._lease.is_dead(container.labels.get(LABEL_LEASE, "")):
            return "its sandboxd is dead"
        if container.state == "created" and container.created_at < time.time() - NEVER_STARTED_S:
            return "never started"
        if _deadline_of(container.labels) < time.time() - DEADLINE_GRACE_S:
            return "past its deadline"
        return None

    async def _remove(self, runtime: SandboxRuntime, broken: Sequence[tuple[ListedContainer, str]]) -> set[str]:
        results = await asyncio.gather(
            *(runtime.remove(container.id) for container, _ in broken), return_exceptions=True
        )
        removed = set()
        for (container, reason), result in zip(broken, results, strict=True):
            if isinstance(result, SandboxUnavailable):
                log.error("leftover_not_removed", container=container.name, reason=reason, error=str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                log.warning("leftover_removed", container=container.name, reason=reason)
                removed.add(container.name)
        return removed

    def _forget_absent(self, present: set[str]) -> None:
        """Delete records of containers that the engine does not have and that no task is about to create."""
        for name in self._records.containers():
            if name not in present and not self._factory.knows(name):
                self._records.forget_container(name)


def _deadline_of(labels: Mapping[str, str]) -> float:
    """Return the deadline from the container's label; infinity without a valid label."""
    text = labels.get(LABEL_DEADLINE, "")
    return float(text) if text.isascii() and text.isdigit() else float("inf")
