"""A run and its log: what the log has is answered out of it, what is new gets into it before it takes effect."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from pydantic import JsonValue

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode, SandboxUnavailable
from contract.run_events import (
    ArtifactsCopied,
    CallFinished,
    CallReviewed,
    ModelReplied,
    RunEvent,
    SessionOpened,
    SessionOpening,
)
from orchestrator.dialects.model import Chunk, Model, ModelRequest
from orchestrator.runs.chunks import join_chunks
from orchestrator.runs.live_text import LiveText
from store.run_log import LogEntry, RunLog, RunTaken


class Journal:
    """One run's, for as long as this process works it. `on_taken`: another process has the run: this one's task is to
    be cancelled.

    The loop that runs by it is the ordinary one: it asks the same questions again, in the same order, and gets the same
    answers as far as there are some. Only what follows is asked of the model and of the pool.
    """

    def __init__(
        self, run_log: RunLog, on_taken: Callable[[], object], clock: Callable[[], float] | None = None
    ) -> None:
        # Entries may be continued on a host whose clock differs.
        self._log, self._on_taken, self._clock = run_log, on_taken, clock or run_log.clock
        logged = [entry.event for entry in run_log.entries]
        self._replies = [event for event in logged if isinstance(event, ModelReplied)]
        self._reviews = {event.call_id: event for event in logged if isinstance(event, CallReviewed)}
        self._results = {event.result.call_id: event.result for event in logged if isinstance(event, CallFinished)}
        self.artifacts = next((event for event in logged if isinstance(event, ArtifactsCopied)), None)
        """Those that have been copied out; None: none have been yet."""
        self.is_resumed = bool(logged)
        """Whether another process, or this one before, has begun with the run."""
        self.has_lost_session = any(_is_session_lost(result) for result in self._results.values())
        """Whether a call has found the run's session gone: what the model is told from there on would be worth
        nothing.
        """
        self._given = 0
        self._begun_at: float | None = None
        self.spent_wall_s = max((entry.wall_s for entry in run_log.entries), default=0.0)
        """How long the run had worked when its log ended."""

    @property
    def is_catching_up(self) -> bool:
        """Whether the reply that is being worked through is one of the log: its calls may have been sent."""
        return 0 < self._given <= len(self._replies)

    @property
    def has_reply(self) -> bool:
        """Whether the next reply is one of the log."""
        return self._given < len(self._replies)

    @property
    def began_at(self) -> float | None:
        """When what is in the log began, Unix seconds; None: nothing is."""
        return self._log.entries[0].event.at if self._log.entries else None

    @property
    def has_grown(self) -> bool:
        """Whether this process has brought the run further."""
        return self._log.has_grown

    @property
    def opening(self) -> str | None:
        """The session that was about to be opened when the log ended, and is not known to be there."""
        last = self._last((SessionOpening, SessionOpened))
        return last.session if isinstance(last, SessionOpening) else None

    @property
    def session(self) -> SessionOpened | None:
        """The run's session."""
        last = self._last((SessionOpening, SessionOpened))
        return last if isinstance(last, SessionOpened) else None

    def begin(self) -> None:
        """Its sandbox is there: from here its time counts."""
        self._begun_at = time.monotonic()

    def next_reply(self) -> tuple[Chunk, ...] | None:
        """The next reply of the log; None when the model has to be asked."""
        self._given += 1
        return self._replies[self._given - 1].chunks if self._given <= len(self._replies) else None

    def sent_since(self, call: str) -> float | None:
        """Unix seconds of the first moment at which the call may have been sent before this process had the run; None:
        it was not.
        """
        if not self.is_catching_up:
            return None
        review = self._reviews.get(call)
        return max(self._replies[self._given - 1].at, review.at if review is not None else 0.0)

    def now(self) -> float:
        """Unix seconds, by the clock of `sent_since`."""
        return self._clock()

    def review_of(self, call: str) -> ToolCall | ToolResult | None:
        """What an approver has said."""
        known = self._reviews.get(call)
        return None if known is None else known.approved or known.refused

    def result_of(self, call: str) -> ToolResult | None:
        """The result of a call that has ended."""
        return self._results.get(call)

    async def note_opening(self, session: str) -> None:
        await self._append(SessionOpening(run=self._log.run, at=self._clock(), session=session))

    async def note_opened(self, session: str, info: dict[str, JsonValue]) -> None:
        await self._append(SessionOpened(run=self._log.run, at=self._clock(), session=session, info=info))

    async def note_reply(self, chunks: Iterable[Chunk]) -> None:
        await self._append(ModelReplied(run=self._log.run, at=self._clock(), chunks=tuple(chunks)))

    async def note_review(self, call: str, reviewed: ToolCall | ToolResult) -> None:
        approved, refused = (reviewed, None) if isinstance(reviewed, ToolCall) else (None, reviewed)
        await self._append(
            CallReviewed(run=self._log.run, at=self._clock(), call_id=call, approved=approved, refused=refused)
        )

    async def note_result(self, call: str, result: ToolResult) -> None:
        self.has_lost_session = self.has_lost_session or _is_session_lost(result)
        await self._append(CallFinished(run=self._log.run, at=self._clock(), result=result))

    async def note_artifacts(self, paths: Iterable[str], missing: Iterable[str], file: str = "") -> ArtifactsCopied:
        """Return the event that was logged."""
        event = ArtifactsCopied(
            run=self._log.run, at=self._clock(), paths=tuple(paths), missing=tuple(missing), file=file
        )
        await self._append(event)
        return event

    async def _append(self, event: RunEvent) -> None:
        try:
            await self._log.append(LogEntry(event, self._wall_s()))
        except RunTaken:
            await self._stop()

    async def _stop(self) -> NoReturn:
        """Nothing that this process would do counts any more. Waits for being cancelled: whatever it returned or raised
        would be taken for an outcome.
        """
        self._on_taken()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    def _last(self, kinds: tuple[type[SessionOpening], type[SessionOpened]]) -> SessionOpening | SessionOpened | None:
        events = (entry.event for entry in reversed(self._log.entries))
        return next((event for event in events if isinstance(event, kinds)), None)

    def _wall_s(self) -> float:
        return self.spent_wall_s + (time.monotonic() - self._begun_at if self._begun_at is not None else 0.0)


def _is_session_lost(result: ToolResult) -> bool:
    return result.error_code is ErrorCode.SESSION_NOT_FOUND


def _as_text(value: Any) -> Any:
    """The same without halves of surrogate pairs, which cannot be written down: two that belong together are one
    character, others the replacement character.
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


class LoggedModel:
    """A model whose replies are in the log before anybody hears them. A reply comes whole: its calls run when all of it
    is known.
    """

    def __init__(
        self,
        model: Model,
        journal: Journal,
        extra: Mapping[str, object],
        *,
        is_over: bool = False,
        live: LiveText | None = None,
    ) -> None:
        """`extra`: fields that every request carries. `is_over`: the run had used up its time before: nothing new is
        asked. `live`: shows replies while they come."""
        self._model = model
        self._journal = journal
        self._extra = dict(extra)
        self._is_over = is_over
        self._live = live

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        """The reply of the log, else the model's. Raises as the model does; nothing of a reply that broke off is
        logged, or heard.
        """
        chunks = self._journal.next_reply()
        if chunks is None and self._is_over:
            # The run's limit ends this, and a reply that came then would be paid for nothing.
            await asyncio.get_running_loop().create_future()
        if chunks is None and self._journal.has_lost_session:
            raise SandboxUnavailable(
                "the run's sandbox is gone, closed or past its time to live while nobody worked the run: retry the item"
            )
        if chunks is None:
            asked = replace(request, extra={**request.extra, **self._extra})
            chunks = tuple(_as_text(chunk) for chunk in join_chunks([chunk async for chunk in self._shown(asked)]))
            await self._journal.note_reply(chunks)
        for chunk in chunks:
            yield chunk

    async def _shown(self, asked: ModelRequest) -> AsyncIterator[Chunk]:
        """The model's reply, shown as it comes."""
        live = self._live
        if live is None:
            async for chunk in self._model.stream(asked):
                yield chunk
            return
        live.begin()
        is_whole = False
        try:
            async for chunk in self._model.stream(asked):
                live.feed(chunk)
                yield chunk
            is_whole = True
        finally:
            if not is_whole:
                live.withdraw()

    async def aclose(self) -> None:
        """The model is its opener's to close."""
