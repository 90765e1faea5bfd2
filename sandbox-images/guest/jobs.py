"""PID 1's record of the session's background jobs: the keeper of each job, and its last reported state."""

from __future__ import annotations

import os
import time

from guest.commands.job_requests import LOST, RUNNING
from guest.failures import INVALID_ARGUMENTS, RequestFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.calls import SupervisorHandle
    from guest.commands.job_requests import JobStartRequest
    from guest.paths import GuestPaths

MAX_JOBS = 16


class Job:
    """A background job.

    `keeper`: the process that serves the job; None after it has ended. `facts`: the job's state as the keeper last
    reported it.
    """

    __slots__ = ("_started_at", "facts", "id", "keeper", "label")

    def __init__(self, job_id: str, label: str) -> None:
        self.id = job_id
        self.label = label
        self.keeper: SupervisorHandle | None = None
        self.facts: dict[str, object] = {"state": RUNNING, "exit_code": None, "signal": None, "unread": 0}
        self._started_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        """Return whether the last reported state is running."""
        return self.facts["state"] == RUNNING

    def as_field(self) -> dict[str, object]:
        """Return the job as a field of a done event."""
        return {
            **self.facts,
            "job": self.id,
            "label": self.label,
            "age_s": round(time.monotonic() - self._started_at, 3),
        }


class Jobs:
    """The jobs of the session by id, oldest first. Ended jobs stay in the table until a new job needs their place."""

    def __init__(self, paths: GuestPaths) -> None:
        self._paths = paths
        self._jobs: dict[str, Job] = {}
        self._count = 0

    @property
    def has_keepers(self) -> bool:
        """Return whether the keeper of any job lives. A kill for another call must then spare the processes of jobs."""
        return any(job.keeper is not None for job in self._jobs.values())

    @property
    def running(self) -> int:
        """Return the number of running jobs."""
        return sum(job.is_running for job in self._jobs.values())

    def open(self, request: JobStartRequest) -> Job:
        """Create a job and set `request.job`. Raises RequestFailure when MAX_JOBS jobs run already."""
        while len(self._jobs) >= MAX_JOBS:
            ended = next((job for job in self._jobs.values() if not job.is_running), None)
            if ended is None:
                running = ", ".join(self._jobs)
                raise RequestFailure(
                    INVALID_ARGUMENTS, f"{MAX_JOBS} jobs run already, which is the limit: kill one of {running}"
                )
            self.forget(ended)
        self._count += 1
        # An earlier sandbox of the session, or the session that this one was forked from, may have used the name. Its
        # log is a file of the session and stays.
        while os.path.lexists(self._paths.job_log(f"job-{self._count}")):
            self._count += 1
        job = self._jobs[f"job-{self._count}"] = Job(f"job-{self._count}", request.label)
        request.job = job.id
        return job

    def find(self, job_id: str) -> Job:
        """Return the job with this id. Raises RequestFailure when there is none."""
        job = self._jobs.get(job_id)
        if job is None:
            # The session may have started the job in another sandbox, before a fork or a restore.
            earlier = "none has been started in this sandbox; the logs of earlier jobs are in /output/jobs"
            hint = f"there are {', '.join(self._jobs)}" if self._jobs else earlier
            raise RequestFailure(INVALID_ARGUMENTS, f"no job {job_id[:50]!a}: {hint}")
        return job

    def update(self, keeper: SupervisorHandle, facts: object) -> None:
        """Store the state that a job's keeper reports.

        Ignore `running` for a job that has ended: a report that was written before the end may be read after it.
        """
        job = self._find_by_keeper(keeper)
        if job is not None and isinstance(facts, dict) and (job.is_running or facts["state"] != RUNNING):
            job.facts = facts

    def drop(self, keeper: SupervisorHandle) -> None:
        """Remove a job that could not be started."""
        job = self._find_by_keeper(keeper)
        if job is not None:
            del self._jobs[job.id]

    def end_keeper(self, keeper: SupervisorHandle) -> tuple[bool, Job | None]:
        """Record that a supervisor has exited.

        Return whether processes of its job may still run, and the job (None if the supervisor was no keeper).
        """
        job = self._find_by_keeper(keeper)
        if job is None:
            return False, None
        job.keeper = None
        if not job.is_running:
            return False, job
        # A program has killed the keeper. PID 1 now kills the rest of the job.
        job.facts = {**job.facts, "state": LOST}
        return True, job

    def as_fields(self) -> dict[str, object]:
        """Return the fields of the answer (done event) to a JobListRequest."""
        return {"jobs": [job.as_field() for job in self._jobs.values()]}

    def _find_by_keeper(self, keeper: SupervisorHandle) -> Job | None:
        return next((job for job in self._jobs.values() if job.keeper is keeper), None)

    def forget(self, job: Job) -> None:
        """Remove the job from the table."""
        del self._jobs[job.id]
