"""Reports that live workers write, and the names by which call records identify workers."""

from typing import Annotated, Literal

from pydantic import Field

from toolcrew.contract.calls import Record
from toolcrew.contract.session_spec import LargestOptions

RELEASE = "1"
"""Compatibility number of this release: releases with different numbers cannot work together. New sessions go only to
workers that report the same number.
"""
HEARTBEAT_S = 3.0
HOST_TTL_S = 10
"""Seconds that a worker counts as alive after its last report."""
RESTART_GRACE_S = 30
"""Seconds that a host with sessions counts as alive after a clean stop. Its sandboxd keeps the sessions, and usually
its worker starts again.
"""
TOMBSTONE_TTL_S = 24 * 3600
"""Seconds for which an incarnation (the worker of a host since its last boot) stays marked as lost (`tombstone_key`).
If its process resumes during this time, the process must not use its old name.
"""
MAX_PROBLEM_CHARS = 500
MAX_IMAGES_PRESENT = 1000

HOST_LOST_TYPE = "HostLost"
"""Exception type in the stored result of a call that was in the queue of a host when the host was declared lost."""

DRAIN_ORDER = "worker.drain"
"""Name of the order that takes a worker out of service. It is sent through the worker's control list. Arguments:
`queue`, the queue of the worker, and `lossy`, whether files may be lost.
"""


class HostReport(Record):
    """Report of one live worker, written every HEARTBEAT_S seconds. It expires HOST_TTL_S after the last write.

    Sizes are in bytes, times in Unix seconds. `queue`: the queue of the incarnation, `host.<host>.<boot>`, or
    `pool.<host>.<boot>` without sandboxes. `worker`: a random id of the process that serves the queue; "" after a clean
    stop, while the next process of the host, which uses another queue, is expected. `slots`: number of calls that the
    worker runs at the same time. `pools`: shared queues that the worker serves too. `process`: an id from which the
    next process on the same machine sees that this one has ended (workers/reports.py).
    """

    host: str = Field(max_length=64)
    queue: str = Field(max_length=256)
    worker: str = Field(max_length=64)
    process: str = Field(default="", max_length=128)
    kind: Literal["sandbox", "web"]
    release: str = Field(default=RELEASE, max_length=32)
    pools: tuple[str, ...] = ()
    slots: int = Field(ge=1)
    busy: int = Field(default=0, ge=0)
    sessions: int = Field(default=0, ge=0)
    max_sessions: int = Field(default=0, ge=0)
    sandboxes: int = Field(default=0, ge=0)
    max_sandboxes: int = Field(default=0, ge=0)
    memory_free_bytes: int = Field(default=0, ge=0)
    disk_free_bytes: int = Field(default=0, ge=0)
    classes: tuple[str, ...] = ()
    """Tenant classes that this host supports."""
    largest: dict[str, LargestOptions] = Field(default_factory=dict, exclude_if=lambda classes: not classes)
    """Largest options that a session may request, by tenant class."""
    egress_classes: tuple[str, ...] = Field(default=(), exclude_if=lambda classes: not classes)
    """Tenant classes whose sessions may have network egress."""
    images: tuple[str, ...] = ()
    """Names and patterns of images that any class of this host may use (contract/image_names.py)."""
    images_present: Annotated[
        tuple[str, ...], Field(max_length=MAX_IMAGES_PRESENT, exclude_if=lambda images: not images)
    ] = ()
    """Images that the host may pull and already has; if there are too many, only the most recently used ones. A host
    that pulls no images omits the field, so that earlier releases can read its report.
    """
    healthy: bool = True
    """False while the sandboxd of the host does not answer. The host then gets no new sessions."""
    draining: bool = False
    """True while the host gets no new sessions, because its sessions move to other hosts or it restarts."""
    store: Literal["local", "shared"] = "local"
    """Name of the store with the host's checkpoints. Another host cannot restore checkpoints from a `local` store."""
    problem: str = Field(default="", max_length=MAX_PROBLEM_CHARS)
    """Message for the operator: why the host is not healthy, or what its drain waits for."""
    started_at: float
    reported_at: float

    @property
    def state(self) -> Literal["serving", "unhealthy", "draining", "restarting"]:
        """State of the worker as pages and commands show it."""
        if not self.worker:
            return "restarting"
        if self.draining:
            return "draining"
        return "serving" if self.healthy else "unhealthy"


def holder_name(queue: str, worker: str) -> str:
    """Return the name of a call's holder in the call records: the worker's incarnation and its process."""
    return f"{queue}/{worker}"


def parse_holder(holder: str) -> tuple[str, str]:
    """Split the name of a call's holder (`holder_name`) into the worker's queue and the worker's id."""
    queue, _, worker = holder.partition("/")
    return queue, worker
