"""What a worker tells of itself while it lives, and who is meant by the names of workers in the ledger."""

from typing import Literal

from pydantic import Field

from contract.calls import Record

RELEASE = "1"
"""Changes when two sides of different releases would misunderstand one another; new sessions go only to workers that
tell the same.
"""
HEARTBEAT_S = 3.0
HOST_TTL_S = 10
"""How long a worker counts as alive after its last report."""
RESTART_GRACE_S = 30
"""How long a host that ended in order, with sessions, still counts as alive: its sandboxd keeps them, and its worker is
mostly started again.
"""
TOMBSTONE_TTL_S = 24 * 3600
"""How long an incarnation that was given up is remembered: it may wake up and must not go on under its name."""
MAX_TROUBLE_CHARS = 500

HOST_LOST_TYPE = "HostLost"
"""What stands as the exception's type in the stored result of a call whose host was given up while it waited."""

DRAIN_ORDER = "worker.drain"
"""The order, on a worker's control list, to be taken out of service: arguments `queue`, whom it is for, and `lossy`,
whether files may be lost.
"""


class HostReport(Record):
    """One living worker, reported every HEARTBEAT_S seconds; it vanishes HOST_TTL_S after the last one. Sizes in bytes,
    instants in Unix seconds.

    `queue`: of its incarnation, `host.<host>.<boot>`, or `pool.<host>.<boot>` without sandboxes. `worker`: a word of
    the process that serves the queue; "" when it has ended in order, and its successor, which takes another queue, is
    awaited. `slots`: calls at a time; `pools`: the shared queues that it serves besides. `process`: by which its
    successor on the same machine sees at once that it is gone (workers/reports.py).
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
    """Tenant classes that this host knows."""
    images: tuple[str, ...] = ()
    """Images that any class of this host may use."""
    healthy: bool = True
    """False while its sandboxd is silent: nothing new is placed there."""
    draining: bool = False
    """It takes no new sessions: its own go elsewhere, or it is being restarted."""
    store: Literal["local", "shared"] = "local"
    """Where its checkpoints go: `local` ones cannot be restored on another host."""
    trouble: str = Field(default="", max_length=MAX_TROUBLE_CHARS)
    """What its operator should know: why it is not healthy, or what its drain waits for."""
    started_at: float
    reported_at: float

    @property
    def state(self) -> Literal["serving", "unhealthy", "draining", "restarting"]:
        """In one word, as people are shown it."""
        if not self.worker:
            return "restarting"
        if self.draining:
            return "draining"
        return "serving" if self.healthy else "unhealthy"


def holder_name(queue: str, worker: str) -> str:
    """How the ledger names who runs a call: the worker's incarnation and the process of it."""
    return f"{queue}/{worker}"


def parse_holder(holder: str) -> tuple[str, str]:
    """Queue and worker of a holder's name."""
    queue, _, worker = holder.partition("/")
    return queue, worker
