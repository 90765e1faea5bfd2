"""What the ends of calls tell of a session: whether its files may have changed, and which background jobs run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_READING = frozenset({"read_text", "read_file", "glob", "grep", "ping", "job_poll", "job_list"})
"""Requests that leave files alone. All others may change some, whatever came of them."""
_MOST_JOBS = 16
"""Of a guest of ours; what another says is no reason to remember more."""
_ID_CHARS = 64


@dataclass
class Traces:
    """`has_written`: a request that may have changed files has ended since they were kept last; `jobs`: ids of background jobs that are not
    known to have ended. A guest's word: good for counting, and for nothing that another session relies on."""

    has_written: bool = False
    jobs: set[str] = field(default_factory=set)

    @property
    def changed(self) -> bool:
        """Whether files may differ from what was kept last. A job may write at any time."""
        return self.has_written or bool(self.jobs)

    def note(self, op: str, done: Mapping[str, Any]) -> None:
        """The end of a request; an empty answer when nobody knows how it ended."""
        if op not in _READING:
            self.has_written = True
        told = done.get("jobs") if op == "job_list" else [done.get("job")]
        for job in told if isinstance(told, list) else []:
            self._note_job(job)

    def note_jobs(self, running: int) -> None:
        """How many jobs run, by the guest's attestation."""
        if running == 0:
            self.end_jobs()

    def end_jobs(self) -> None:
        """None runs any more; what they wrote at last nobody has kept."""
        self.has_written = self.changed
        self.jobs.clear()

    def _note_job(self, job: object) -> None:
        if not isinstance(job, dict) or not isinstance(name := job.get("job"), str) or len(name) > _ID_CHARS:
            return
        if job.get("state") == "running":
            if len(self.jobs) < _MOST_JOBS:
                self.jobs.add(name)
        elif name in self.jobs:
            self.jobs.discard(name)
            self.has_written = True
