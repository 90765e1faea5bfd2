"""Session of this host: its sandbox, the state of its files, and its news (facts that the answer to the next call
reports).

Invariant: the model learns of every loss. A loss of files stays in `news` or `unreported_loss` until a call reports it,
and the session's record on disk contains both. A second rule protects other tenants. Values that the guest reports are
used only for counting and scheduling; the safety of another session never depends on them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from structlog.contextvars import bound_contextvars

from toolcrew.contract.guest_protocol import REQUESTS
from toolcrew.contract.session_spec import SessionMove
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.disks.base import Workspace
from toolcrew.workers.sandboxd.metering import UsageTotals
from toolcrew.workers.sandboxd.plans import SandboxPlan
from toolcrew.workers.sandboxd.records import SessionRecord
from toolcrew.workers.sandboxd.sandbox import Sandbox

_READING = frozenset({"ping", *(op for op, request in REQUESTS.items() if request.READS_ONLY)})
"""Requests (`op`) that do not change files. All other requests may change files, even if they fail."""
_MAX_JOBS = 16
"""Maximum number of background jobs that a correct guest runs. sandboxd stores no more ids, so a hostile guest cannot
fill its memory.
"""
_ID_CHARS = 64
FILES_KEPT = (
    "the sandbox of this session had ended ({}) and was rebuilt around its workspace: the files in /workspace are "
    "kept; background jobs, kept outputs and the shell's folder and variables are lost"
)
FILES_LOST = "{} and its files are lost; the next call gets a fresh, empty one"
RENEW_S = 86_400.0
"""Age in seconds at which an automatic checkpoint is renewed. The renewal keeps the checkpoint of an active session
younger than the age at which old checkpoints are deleted.
"""
_ROW_CHARS = 200
MAX_CANCELLED_CALLS = 100
"""Maximum number of stored ids of cancelled calls. The newest ids are kept; ids are never reused."""
_RESTORED = (
    "{why}, and the session continues on another host: its files, kept outputs and the shell's folder, variables and "
    "functions are those of {checkpoint}; changes since then and background jobs are lost"
)


@dataclass
class SessionActivity:
    """Changes to the files of a session. `has_written`: a request that may have changed files has ended since the last
    checkpoint. `jobs`: ids of background jobs that may still run. `has_streams`: processes of streams may still run.
    The guest reports these values, so the safety of other sessions must not depend on them.
    """

    has_written: bool = False
    jobs: set[str] = field(default_factory=set)
    has_streams: bool = False

    @property
    def may_run(self) -> bool:
        """Return whether programs may run between calls."""
        return bool(self.jobs) or self.has_streams

    @property
    def changed(self) -> bool:
        """Return whether files may differ from the last checkpoint. A running program may write at any time."""
        return self.has_written or self.may_run

    def record(self, op: str, done: Mapping[str, Any]) -> None:
        """Record the end of a request. `done`: the guest's answer; empty if the outcome is unknown."""
        # A failed or unknown outcome counts too: an unnecessary checkpoint is cheap, a missing checkpoint loses files.
        if op not in _READING:
            self.has_written = True
        jobs = done.get("jobs") if op == "job_list" else [done.get("job")]
        for job in jobs if isinstance(jobs, list) else []:
            self._record_job(job)

    def record_jobs(self, running: int) -> None:
        """Record the number of programs that run between calls, as the guest attests it."""
        if running == 0:
            self.end_jobs()

    def end_jobs(self) -> None:
        """Record that no job runs. If one was running, files count as changed: its last writes are not in a
        checkpoint.
        """
        self.has_written = self.changed
        self.has_streams = False
        self.jobs.clear()

    def _record_job(self, job: object) -> None:
        if not isinstance(job, dict) or not isinstance(name := job.get("job"), str) or len(name) > _ID_CHARS:
            return
        if job.get("state") == "running":
            # Store a limited number of ids: a hostile guest could invent job ids to fill the memory of sandboxd.
            if len(self.jobs) < _MAX_JOBS:
                self.jobs.add(name)
        elif name in self.jobs:
            self.jobs.discard(name)
            self.has_written = True


@dataclass(eq=False)
class HostSession:
    """A session of this host.

    `policy`: the tenant's latest sandbox policy from a worker. `plan`: the plan of the sandbox, made from the policy at
    the sandbox's creation. `fence`: the number of the session's opening; each later opening, on any host, has a higher
    number. `run`: the run of the last call. `sandbox`: None after an eviction or a restart of sandboxd. `archive`: the
    packed files of the evicted container. `is_unfilled`: the workspace is still empty, and the archive contains its
    files too. `lost`: the reason why the sandbox was lost. `news`: facts that the next call's answer reports.
    `unreported_loss`: a loss of all files that no call has reported yet. `is_closing`: no request may use the session;
    the session stays in the list until its container is removed. `is_moving`: the sandbox is being evicted, and calls
    wait for the lock. `checkpoint`: id of the last checkpoint that this host made. `automatic_at`: the time of the last
    automatic checkpoint, in epoch seconds. `checkpointing`: a lock that is held while a checkpoint is made; calls
    continue. `overfull_bytes`: the size of the workspace when it was last found too large. `waiting`: ids of calls that
    wait for the sandbox; a cancel removes an id. `handover`: after a fork, the task that packs the parent's container
    into this session's archive. `cancelled_calls`: ids of calls that were cancelled before they began, or between two
    of their requests. `usage`: what all sandboxes of the session have used since this process started.
    """

    id: str
    plan: SandboxPlan
    ttl_s: float
    workspace: Workspace
    sandbox: Sandbox | None
    generation: int = 1
    policy: SandboxPolicy = field(default_factory=SandboxPolicy)
    archive: str | None = field(init=False, default=None)
    is_unfilled: bool = field(init=False, default=False)
    lost: str | None = field(init=False, default=None)
    news: str | None = field(init=False, default=None)
    unreported_loss: str | None = field(init=False, default=None)
    failed_unpacks: int = field(init=False, default=0)
    failed_packs: int = field(init=False, default=0)
    used_at: float = field(init=False, default_factory=time.monotonic)
    checked_at: float = field(init=False, default=0.0)
    is_paused: bool = field(init=False, default=False)
    is_moving: bool = field(init=False, default=False)
    is_closing: bool = field(init=False, default=False)
    was_rebuilt: bool = field(init=False, default=False)
    overfull_bytes: int = field(init=False, default=0)
    fence: int = field(init=False, default=1)
    run: str | None = field(init=False, default=None)
    activity: SessionActivity = field(init=False, default_factory=SessionActivity)
    checkpoint: str | None = field(init=False, default=None)
    automatic_at: float | None = field(init=False, default=None)
    handover: "asyncio.Task[None] | None" = field(init=False, default=None)
    waiting: list[str] = field(init=False, default_factory=list)
    usage: UsageTotals = field(init=False, default_factory=UsageTotals)
    cancelled_calls: deque[str] = field(init=False, default_factory=lambda: deque(maxlen=MAX_CANCELLED_CALLS))
    lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    checkpointing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @property
    def tenant(self) -> str:
        return self.id.partition(":")[0]

    @property
    def secrets(self) -> list[str]:
        """Return the names of the secrets that the session may use now."""
        allowed = self.policy.secrets
        return [name for name, _ in self.plan.secrets if allowed is None or name in allowed]

    @property
    def is_ready(self) -> bool:
        """Return whether a call can begin at once."""
        return self.sandbox is not None and self.sandbox.lost is None and not self.is_paused and not self.is_moving

    @property
    def is_busy(self) -> bool:
        # A running checkpoint counts as use, so that the session is not evicted meanwhile.
        return (self.sandbox is not None and bool(self.sandbox.calls)) or self.checkpointing.locked()

    @property
    def is_streaming(self) -> bool:
        """Return whether bytes of streams flow."""
        return self.sandbox is not None and self.sandbox.streams is not None and self.sandbox.streams.is_active

    @property
    def may_evict(self) -> bool:
        """Return whether the session has a sandbox that no open stream keeps."""
        return self.sandbox is not None and (self.sandbox.streams is None or not self.sandbox.streams.is_open)

    async def handed_over(self) -> None:
        """Wait until this session has the archive with the state of the container from which it was forked."""
        if self.handover is not None:
            await asyncio.wait({self.handover})
            self.handover = None

    def describe_usage(self) -> dict[str, Any]:
        """Return the totals of the session until now (contract/calls.py: SessionUsage)."""
        if self.sandbox is not None:
            # Read disk bytes only while programs may run: otherwise nothing uses disks between calls, and the reading
            # blocks the event loop of all sessions.
            self.sandbox.meter.update(has_disks=self.activity.may_run)
        return self.usage.describe()

    def idle_s(self) -> float:
        """Return the seconds since the last use; 0 while a call runs or bytes of streams flow."""
        return 0.0 if self.is_busy or self.is_streaming else time.monotonic() - self.used_at

    def record(self) -> SessionRecord:
        """Return the state that must survive the death of sandboxd."""
        # Store wall-clock time, because the monotonic clock starts again when the host boots.
        used_at = time.time() - (time.monotonic() - self.used_at)
        return SessionRecord(
            id=self.id,
            plan=self.plan,
            ttl_s=self.ttl_s,
            workspace=self.workspace.name,
            kind=self.workspace.kind,
            layers=self.workspace.layers,
            unfilled=self.is_unfilled,
            generation=self.generation,
            archive=self.archive,
            used_at=used_at,
            news=self.news,
            unreported_loss=self.unreported_loss,
            policy=self.policy,
            fence=self.fence,
            changed=self.activity.changed,
            automatic_at=self.automatic_at,
        )

    def add_news(self, news: str) -> None:
        """Add a fact for the next call's answer."""
        if self.news is None or news not in self.news:
            self.news = news if self.news is None else f"{self.news}; {news}"

    def take_news(self) -> str | None:
        """Return the news and clear it, so that it is reported once."""
        news, self.news = self.news, None
        return news

    def identify_sandbox(self, sandbox: Sandbox) -> dict[str, Any]:
        """Return the fields that identify the sandbox, without news. News belong into the answer of a call, which a
        model reads.
        """
        return {"id": sandbox.container[:12], "generation": sandbox.generation, "rebuilt": self.was_rebuilt}

    def describe_sandbox(self, sandbox: Sandbox) -> dict[str, Any]:
        """Return the fields that identify the sandbox, with the news, for a call's result."""
        news = self.take_news()
        return self.identify_sandbox(sandbox) | ({"news": news} if news else {})

    def describe(self) -> dict[str, Any]:
        """Return the session's row for workers, without tenant content. `jobs` and `changed` are derived from what the
        guest reports.
        """
        sandbox = self.sandbox
        lost = sandbox.lost if sandbox is not None else self.lost
        return {
            "name": self.id,
            "container": sandbox.container[:12] if sandbox is not None else None,
            "image": self.plan.image[:_ROW_CHARS],
            "generation": self.generation,
            "fence": self.fence,
            "calls": len(sandbox.calls) if sandbox is not None else 0,
            "jobs": len(self.activity.jobs),
            "changed": self._has_changed(),
            "checkpoint": self.checkpoint,
            "idle_s": round(self.idle_s(), 3),
            "ttl_s": self.ttl_s,
            "lost": lost[:_ROW_CHARS] if lost is not None else None,
            "state": self._state(),
        }

    def record_checkpoint(self, checkpoint: str, *, is_automatic: bool) -> None:
        """Store the id of a new checkpoint, and its time if it is automatic."""
        self.checkpoint = checkpoint
        if is_automatic:
            self.automatic_at = time.time()

    def _has_changed(self) -> bool:
        """Return whether another automatic checkpoint is useful: files may have changed, or the last checkpoint would
        soon expire.
        """
        return self.activity.changed or (self.automatic_at is not None and time.time() - self.automatic_at > RENEW_S)

    def _state(self) -> str:
        if self.sandbox is None:
            return "lost" if self.lost is not None else "evicted"
        if self.sandbox.lost is not None:
            return "lost"
        return "paused" if self.is_paused else "ready"


_LEAVING = {
    False: "the host that had this session was lost",
    True: "the host that had this session was taken out of service",
}


def build_move_news(move: SessionMove) -> str:
    """Return the text that tells the model what a session restored from a checkpoint has lost."""
    at = move.checkpoint_at
    checkpoint = f"the checkpoint of {at.isoformat(timespec='seconds')}" if at is not None else "its last checkpoint"
    return _RESTORED.format(why=_LEAVING[move.is_planned], checkpoint=checkpoint)


def build_move_loss(move: SessionMove) -> str:
    """Return the loss report of a session without a checkpoint."""
    return FILES_LOST.format(f"{_LEAVING[move.is_planned]}, and there was no checkpoint of it: the sandbox")


def bound_to_session(name: object) -> AbstractContextManager[Any]:
    """Add the tenant and the session of `name` (`<tenant>:<session>`) to all log lines of the block. Any other value of
    `name` adds nothing.
    """
    tenant, colon, session = name.partition(":") if isinstance(name, str) else ("", "", "")
    return bound_contextvars(tenant=tenant, session=session) if colon else bound_contextvars()
