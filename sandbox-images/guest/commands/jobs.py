"""PID 1's record of the session's background jobs: who keeps each, and what was last heard of it."""

from __future__ import annotations

import time

from guest.failures import INVALID_ARGUMENTS, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.commands.job_requests import JobStartRequest
    from guest.supervisors import SupervisorHandle

MAX_JOBS = 16
RUNNING, EXITED, KILLED, LOST = "running", "exited", "killed", "lost"
"""The states of a job. Lost: its keeper was killed by a program, and the rest of it by PID 1."""


class Job:
    """`keeper` is the supervisor that stays with the job, None once that has left. `facts` are its own words."""

    __slots__ = ("_started_at", "facts", "id", "keeper", "label")

    def __init__(self, job_id: str, label: str) -> None:
        self.id = job_id
        self.label = label
        self.keeper: SupervisorHandle | None = None
        self.facts: dict[str, object] = {"state": RUNNING, "exit_code": None, "signal": None, "unread": 0}
        self._started_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        return self.facts["state"] == RUNNING

    def as_field(self) -> dict[str, object]:
        return {
            **self.facts,
            "job": self.id,
            "label": self.label,
            "age_s": round(time.monotonic() - self._started_at, 3),
        }


class Jobs:
    """By id, the oldest first. What has ended is remembered until there is no room."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._count = 0

    @property
    def are_kept(self) -> bool:
        """Whether a keeper lives: processes that no other call's kill may meet."""
        return any(job.keeper is not None for job in self._jobs.values())

    @property
    def running(self) -> int:
        """How many jobs run."""
        return sum(job.is_running for job in self._jobs.values())

    def open(self, request: JobStartRequest) -> Job:
        """A new job. Raises Failure when there are too many that run."""
        while len(self._jobs) >= MAX_JOBS:
            ended = next((job for job in self._jobs.values() if not job.is_running), None)
            if ended is None:
                running = ", ".join(self._jobs)
                raise Failure(
                    INVALID_ARGUMENTS, f"{MAX_JOBS} jobs run already, and more are not allowed: kill one of {running}"
                )
            self.forget(ended)
        self._count += 1
        job = self._jobs[f"job-{self._count}"] = Job(f"job-{self._count}", request.label)
        request.job = job.id
        return job

    def find(self, job_id: str) -> Job:
        """Raises Failure when there is none of that id."""
        job = self._jobs.get(job_id)
        if job is None:
            known = f"there are {', '.join(self._jobs)}" if self._jobs else "none has been started"
            raise Failure(INVALID_ARGUMENTS, f"no job {job_id[:50]!a}: {known}")
        return job

    def note(self, keeper: SupervisorHandle, facts: object) -> None:
        """What a job's keeper tells of it. An end is the last: an answer written before it may be read with it, and
        noted after it.
        """
        job = self._of(keeper)
        if job is not None and isinstance(facts, dict) and (job.is_running or facts["state"] != RUNNING):
            job.facts = facts

    def drop(self, keeper: SupervisorHandle) -> None:
        """The job could not be started: it never was."""
        job = self._of(keeper)
        if job is not None:
            del self._jobs[job.id]

    def end_keeper(self, keeper: SupervisorHandle) -> tuple[bool, Job | None]:
        """A supervisor has exited: whether it leaves a job behind that it did not see to its end, and the job it
        kept.
        """
        job = self._of(keeper)
        if job is None:
            return False, None
        job.keeper = None
        if not job.is_running:
            return False, job
        job.facts = {**job.facts, "state": LOST}
        return True, job

    def as_fields(self) -> dict[str, object]:
        """The done event of a list."""
        return {"jobs": [job.as_field() for job in self._jobs.values()]}

    def _of(self, keeper: SupervisorHandle) -> Job | None:
        return next((job for job in self._jobs.values() if job.keeper is keeper), None)

    def forget(self, job: Job) -> None:
        del self._jobs[job.id]
