"""Journals of runs. That of a durable run writes the events of the run to its log in Redis, and replays the log of a
resumed run.

Invariant: an event is in the log before the event takes effect. A process that resumes the run replays the logged
events. The process asks the model and the pool only for what the log does not contain.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable
from toolcrew.contract.run_events import (
    ArtifactsCopied,
    CallFinished,
    CallReviewed,
    ModelReplied,
    RunEvent,
    SessionOpened,
    SessionOpening,
    StateForking,
    StateKept,
    SubmissionTaken,
)
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.dialects.thinking import mark_reasoning
from toolcrew.orchestrator.models.chunks import join_content
from toolcrew.orchestrator.runs.chunks import join_chunks
from toolcrew.orchestrator.runs.model_account import Count
from toolcrew.store.run_log import RunLog, RunTaken
from toolcrew.store.usage import ReplySpending

E = TypeVar("E", bound=RunEvent)


class MemoryJournal:
    """Journal of a run that ends with its process: a Journal that keeps nothing, because nothing is replayed. `count`:
    adds to the usage of the run's tenant.
    """

    is_durable = is_catching_up = False

    def __init__(self, count: Count) -> None:
        self._count = count

    def next_reply(self) -> tuple[Chunk, ...] | None:
        return None

    def check_session(self) -> None:
        """Do nothing: the run has its session for as long as its process."""

    async def record_reply(self, chunks: list[Chunk], spending: ReplySpending) -> tuple[Chunk, ...] | None:
        await retry_until_available(lambda: self._count(spending))
        return None

    def review_of(self, call: str) -> ToolCall | ToolResult | None:
        return None

    async def record_review(self, call: str, reviewed: ToolCall | ToolResult) -> None:
        """Do nothing."""

    def result_of(self, call: str) -> ToolResult | None:
        return None

    async def record_result(self, result: ToolResult) -> None:
        """Do nothing."""

    def sent_since(self, call: str) -> float | None:
        return None

    def now(self) -> float:
        return time.time()


class Journal:
    """Journal of one run in Redis, for as long as this process executes the run.

    `on_taken` is called when another process owns the run. The callback must cancel the task that executes the run
    here.

    A resumed run uses the ordinary agent loop. The loop makes the same requests in the same order and receives the
    logged results. Only requests after the end of the log go to the model and the pool.
    """

    is_durable = True
    """Whether another process can continue the run from the journal."""

    def __init__(
        self, run_log: RunLog, on_taken: Callable[[], object], clock: Callable[[], float] | None = None
    ) -> None:
        # Another host may continue this log and its clock may differ. All times of a log come from the log's own
        # clock.
        self._log = run_log
        self._on_taken = on_taken
        self._clock = clock or run_log.clock
        logged = list(run_log.entries)
        self._replies = [event for event in logged if isinstance(event, ModelReplied)]
        self._reviews = {event.call_id: event for event in logged if isinstance(event, CallReviewed)}
        self._results = {event.result.call_id: event.result for event in logged if isinstance(event, CallFinished)}
        self.is_resumed = bool(logged)
        """True if the log has entries: this process or an earlier process has already started the run."""
        # Number of replies that the loop has requested. If it is higher than the number of logged replies, the current
        # reply is new.
        self._replayed = 0
        self._begun_at: float | None = None
        self.spent_wall_s = max((event.wall_s for event in logged), default=0.0)
        """Working time of the run at the end of its log, in seconds."""

    @property
    def is_catching_up(self) -> bool:
        """Return whether the current reply comes from the log. An earlier process may have sent the calls of such a
        reply.
        """
        return 0 < self._replayed <= len(self._replies)

    @property
    def has_reply(self) -> bool:
        """Return whether the next reply comes from the log."""
        return self._replayed < len(self._replies)

    @property
    def began_at(self) -> float | None:
        """Return the time of the first log entry, in Unix seconds; None if the log is empty."""
        return self._log.entries[0].at if self._log.entries else None

    @property
    def has_grown(self) -> bool:
        """Return whether this process has added entries to the log."""
        return self._log.has_grown

    def check_session(self) -> None:
        """Raise SandboxUnavailable if a call found that the run's session no longer exists. Later replies of the model
        would rely on lost files.
        """
        results = (event.result for event in self._log.entries if isinstance(event, CallFinished))
        if any(result.error_code is ErrorCode.SESSION_NOT_FOUND for result in results):
            raise SandboxUnavailable(
                "the run's sandbox was closed or has expired while no process executed the run: retry the item"
            )

    @property
    def artifacts(self) -> ArtifactsCopied | None:
        """Return the logged copy of the run's artifacts; None if no artifacts are copied yet."""
        return self._last(ArtifactsCopied)

    @property
    def submission(self) -> SubmissionTaken | None:
        """Return the logged end of the agent's work; None if the grading has not begun."""
        return self._last(SubmissionTaken)

    @property
    def opening(self) -> str | None:
        """Return the session that the run was opening when its log ended; None otherwise. The session may not exist."""
        last = self._last(SessionOpening, SessionOpened)
        return last.session if isinstance(last, SessionOpening) else None

    @property
    def session(self) -> SessionOpened | None:
        """Return the session that the log says is open; None if there is none."""
        last = self._last(SessionOpening, SessionOpened)
        return last if isinstance(last, SessionOpened) else None

    @property
    def steps(self) -> int:
        """Return the number of replies in the log. All but the last of these steps are complete."""
        return sum(isinstance(event, ModelReplied) for event in self._log.entries)

    @property
    def state(self) -> StateForking | StateKept | None:
        """Return the last event about a kept state; None if there is none."""
        last = self._last(StateForking, StateKept)
        return last if isinstance(last, StateForking | StateKept) else None

    @property
    def states(self) -> list[str]:
        """Return the names of the sessions that this run has created, or was about to create, for its kept states. The
        states of copied steps belong to another run.
        """
        return [event.session for event in self._log.entries if isinstance(event, StateForking)]

    def bill(self, session: str | None) -> None:
        """Charge all later replies of the model to this session. None: count them for no session."""
        self._log.session = session

    def begin(self) -> None:
        """Start to count the working time of the run. Called when the sandbox is ready."""
        self._begun_at = time.monotonic()

    def next_reply(self) -> tuple[Chunk, ...] | None:
        """Return the next reply of the log; None if the log has no more replies and the model must be asked."""
        self._replayed += 1
        return self._replies[self._replayed - 1].chunks if self._replayed <= len(self._replies) else None

    def sent_since(self, call: str) -> float | None:
        """Return the earliest time at which an earlier process may have sent the call, in Unix seconds.

        Returns None if no earlier process can have sent the call.
        """
        if not self.is_catching_up:
            return None
        review = self._reviews.get(call)
        # The earlier process logged the reply, and the review if there is one, before it sent the call.
        return max(self._replies[self._replayed - 1].at, review.at if review is not None else 0.0)

    def now(self) -> float:
        """Return the current time in Unix seconds, from the same clock as `sent_since`."""
        return self._clock()

    def review_of(self, call: str) -> ToolCall | ToolResult | None:
        """Return the logged decision about a call: the approved call, or the result that refuses the call. None if the
        log has no decision. `call`: the id of the call.
        """
        review = self._reviews.get(call)
        return None if review is None else review.approved or review.refused

    def result_of(self, call: str) -> ToolResult | None:
        """Return the logged result of a call; None if the call has not finished."""
        return self._results.get(call)

    async def record(self, kind: type[E], spending: ReplySpending | None = None, **fields: Any) -> E:
        """Log an event of this type with these fields, and return it. Counts `spending` in the same step. If another
        process owns the run, the method does not return: the task of the run is cancelled.
        """
        event = kind(run=self._log.run, at=self._clock(), wall_s=self._wall_s(), **fields)
        try:
            await self._log.append(event, spending)
        except RunTaken:
            await self._stop()
        return event

    async def record_reply(self, chunks: list[Chunk], spending: ReplySpending) -> tuple[Chunk, ...] | None:
        """Log a complete reply of the model, and count `spending` in the same step. Return the logged reply if it is
        not read in the same way as these chunks; None otherwise.
        """
        reply, is_changed = build_logged_reply(chunks)
        await self.record(ModelReplied, spending, chunks=reply)
        return reply if is_changed else None

    async def record_result(self, result: ToolResult) -> None:
        """Log the result of a call."""
        await self.record(CallFinished, result=result)

    async def record_review(self, call: str, reviewed: ToolCall | ToolResult) -> None:
        """Log the decision about a call: the approved call, or the result that refuses the call."""
        approved, refused = (reviewed, None) if isinstance(reviewed, ToolCall) else (None, reviewed)
        await self.record(CallReviewed, call_id=call, approved=approved, refused=refused)

    async def record_submission(self, archive: bytes, **fields: Any) -> SubmissionTaken:
        """Store the archive of the artifacts, log that only the grading remains, and return the logged event.
        `archive`: b"" if there are no artifacts.
        """
        digest = hashlib.sha256(archive).hexdigest() if archive else ""
        if archive:
            await retry_until_available(lambda: self._log.keep_artifacts(archive))
        return await self.record(SubmissionTaken, sha256=digest, **fields)

    async def load_artifacts(self, sha256: str) -> bytes:
        """Return the archive of a logged submission. Raises SandboxUnavailable: it is lost, or was changed."""
        archive = await retry_until_available(self._log.load_artifacts)
        if archive is None or hashlib.sha256(archive).hexdigest() != sha256:
            raise SandboxUnavailable(
                "the artifacts that waited for the grader are not in Redis any more, or were changed there: retry the "
                "item"
            )
        return archive

    async def drop_artifacts(self) -> None:
        """Delete the archive of the submission after its grading."""
        await self._log.drop_artifacts()

    async def _stop(self) -> NoReturn:
        """Report that another process owns the run, then wait until this task is cancelled.

        A return value or an exception would be recorded as the outcome of the run, and this process no longer owns
        the run.
        """
        self._on_taken()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("no code sets it")

    def _last(self, *kinds: type[E]) -> E | None:
        """Return the last event of these types in the log; None if there is none."""
        return next((event for event in reversed(self._log.entries) if isinstance(event, kinds)), None)

    def _wall_s(self) -> float:
        """Return the working time of the run, in seconds, including the time of earlier processes."""
        return self.spent_wall_s + (time.monotonic() - self._begun_at if self._begun_at is not None else 0.0)


RunJournal = Journal | MemoryJournal


def build_logged_reply(chunks: list[Chunk]) -> tuple[tuple[Chunk, ...], bool]:
    """Return the form in which a reply is logged, and whether a dialect may read this form differently."""
    joined = join_chunks(chunks)
    # Redis stores UTF-8. The reply as a whole also shows where its reasoning ends.
    parts = [_as_text(chunk) for chunk in joined]
    mark_reasoning(parts, join_content(parts))
    return tuple(parts), parts != joined


def _as_text(value: Any) -> Any:
    """Return the value without lone surrogates, which UTF-8 cannot encode.

    Two surrogates that form a pair become one character. Any other surrogate becomes the replacement character.
    """
    match value:
        case str():
            return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_as_text(name): _as_text(inner) for name, inner in value.items()}
        case list():
            return [_as_text(inner) for inner in value]
        case _:
            return value
