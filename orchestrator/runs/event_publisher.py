"""Publishes the events of the durable runs that this process executes, and of batches.

Pieces of text are collected for a short time, so that a fast model causes only a few events per second.

Invariant: the owner of a run (the process that executes it) publishes each event exactly once and in order. Each group
of events is sent with the token of the claim and the number of its first event. Redis skips repeated events, and
rejects the events of a process that has lost the run. The next owner publishes the unfinished step again, after a
RunResumed event. The events of a batch have no owner and may be repeated, and no result depends on them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from toolcrew.concurrency.tasks import begin_shared, check_cancelled, retry_until_available
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    EventsOmitted,
    OutputArrived,
    OutputOmitted,
    RunEvent,
    RunResumed,
    StepFinished,
    StepStarted,
    TextArrived,
)
from toolcrew.store.batches import NO_BATCH
from toolcrew.store.connection import RedisClient
from toolcrew.store.run_events import EventBatch, ProgressEvent, RunEventStore, build_event
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

EVERY_S = 0.1
AT_ONCE = 64
PROGRESS_AT_ONCE, MAX_WAITING_PROGRESS = 1000, 50_000
"""Limits of progress events of batches: how many are published together, and how many may wait while Redis does not
answer.
"""
MAX_PIECE_CHARS = 4000
MAX_OUTPUT_CHARS = 256 * 1024
"""Limit of the published output of one call while the call runs, in characters."""
MAX_BUFFERED_CHARS = 4 * 1024 * 1024
"""Limit of the buffered text of one run while Redis does not answer, in characters. Above the limit, pieces of text
and output are omitted, and an event reports the omission.
"""
FINAL_SEND_S = 1.0
"""Seconds that this process has to publish the last events of a run that it returns or loses."""

Piece = tuple[str, ...]
"""Key by which pieces of text are joined: pieces of one text, or of one output stream of a call, have the same key."""


@dataclass
class RunEventBuffer:
    """Unpublished events of one run. Events of steps that an earlier owner has published are omitted."""

    tenant: str
    run: str
    claim: str
    attempt: int
    published_step: int = 0
    """Number of the last step with all its events published."""
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[Piece, dict[str, Any]] = field(default_factory=dict)
    _step: int = 1
    _first: int = 0
    _chars: int = 0
    _output: dict[str, int] = field(default_factory=dict)
    _asking: set[str] = field(default_factory=set)
    _omitted: int = 0
    is_taken: bool = False

    def resume(self) -> None:
        """Add the event that the run was resumed, because an earlier process has published events. Those after the last
        complete step are then invalid.
        """
        self._add(self._fields(RunResumed(run=self.run, step=self.published_step + 1)))

    def on_event(self, event: RunEvent) -> None:
        """Add an event to the buffer. Returns at once."""
        if isinstance(event, StepStarted):
            self._step = event.step
        if self._step > self.published_step:
            self._add_event(event)
        if isinstance(event, StepFinished):
            self._step = event.step + 1

    def _add_event(self, event: RunEvent) -> None:
        """Add an event of a step that is not published yet."""
        if isinstance(event, TextArrived):
            self._add_piece(event, ("text",), event.text)
        elif isinstance(event, OutputArrived):
            self._add_output(event)
        else:
            if isinstance(event, ApprovalAsked):
                self._asking.add(event.digest)
            elif isinstance(event, ApprovalDecided):
                self._asking.discard(event.digest)
            self._add(self._fields(event))

    def _add_output(self, event: OutputArrived) -> None:
        """Add output of a call, up to the limit of the call."""
        fields = self._output.get(event.call_id, 0)
        self._output[event.call_id] = fields + len(event.text)
        if fields + len(event.text) <= MAX_OUTPUT_CHARS:
            self._add_piece(event, (event.call_id, event.stream), event.text)
        elif fields <= MAX_OUTPUT_CHARS:
            # This event is published only once. The result contains the whole output.
            self._add(self._fields(OutputOmitted(run=self.run, at=event.at, call_id=event.call_id)))

    def _add_piece(self, event: RunEvent, piece: Piece, text: str) -> None:
        """Append text to the last piece of the same key, or start new pieces."""
        if self._chars + len(text) > MAX_BUFFERED_CHARS:
            self._omitted += 1
            return
        self._chars += len(text)
        open_piece = self._open.get(piece)
        if open_piece is not None and len(open_piece["text"]) + len(text) <= MAX_PIECE_CHARS:
            open_piece["text"] += text
            return
        for at in range(0, len(text), MAX_PIECE_CHARS):
            fields = {**self._fields(event), "text": text[at : at + MAX_PIECE_CHARS]}
            self._pending.append(fields)
            self._open[piece] = fields

    def _add(self, fields: dict[str, Any]) -> None:
        """Add an event. Later pieces must not join pieces before this event, because that would change the order."""
        self._open.clear()
        self._pending.append(fields)

    def _fields(self, event: RunEvent) -> dict[str, Any]:
        # The agent loop names attempts after the first differently. Published events carry the run id without the
        # attempt.
        return {**event.to_json(), "run": self.run, "attempt": self.attempt}

    @property
    def has_pending(self) -> bool:
        """Return whether the buffer has events that this process may publish."""
        return bool(self._pending) and not self.is_taken

    def take(self) -> EventBatch | None:
        """Return the events to publish next; None if there are none."""
        if not self.has_pending:
            return None
        # Add no more text to a piece that is being published, because that text would count as published without being
        # sent.
        self._open.clear()
        if self._omitted:
            self._pending.append(self._fields(EventsOmitted(run=self.run, count=self._omitted)))
            self._omitted = 0
        page = self._pending[:AT_ONCE]
        steps = [fields["step"] for fields in page if fields["type"] == StepFinished.__name__]
        events = [build_event(fields) for fields in page]
        return EventBatch(
            self.tenant, self.run, self.claim, self._first, events, max(steps, default=None), len(self._asking)
        )

    def confirm(self, count: int, *, is_ours: bool) -> None:
        """Remove published events from the buffer. `is_ours` False: note that another process owns the run."""
        self.is_taken = not is_ours
        done = self._pending[:count]
        del self._pending[:count]
        self._first += count
        self._chars -= sum(
            len(fields["text"]) for fields in done if fields["type"] in (TextArrived.__name__, OutputArrived.__name__)
        )


class RunEventPublisher:
    """Publishes the events of all runs and batches of one process.

    A running run does not wait for its events. At its end the run waits until all events are published, even if Redis
    does not answer for a long time. Nothing waits for events of batches, and too many of them are dropped.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._store = RunEventStore(client, deployment)
        self._buffers: list[RunEventBuffer] = []
        self._progress: list[ProgressEvent] = []
        self._dropped = 0
        self._sending: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    @asynccontextmanager
    async def open(self, tenant: str, run: str, claim: str, attempt: int) -> AsyncIterator[RunEventBuffer]:
        """Yield the event buffer of a run that was claimed with that token.

        Raises BrokerUnavailable: Redis does not answer for a long time.
        """
        step, has_any = await retry_until_available(lambda: self._store.progress(tenant, run))
        buffer = RunEventBuffer(tenant, run, claim, attempt, published_step=step)
        if has_any:
            buffer.resume()
        self._buffers.append(buffer)
        self._begin()
        try:
            yield buffer
        except asyncio.CancelledError:
            # Try to publish only for a short time: the run has ended, or it returns to the queue and its last step is
            # published again.
            with suppress(TimeoutError):
                async with asyncio.timeout(FINAL_SEND_S):
                    await self._send()
            raise
        except Exception:
            await self._send_all(buffer)
            raise
        else:
            await self._send_all(buffer)
        finally:
            self._buffers.remove(buffer)

    def add(self, tenant: str, batch: str, event: RunEvent) -> None:
        """Add one of PROGRESS_EVENTS to the stream of a batch. The events of durable runs are in their own streams."""
        if batch == NO_BATCH:
            return
        if len(self._progress) >= MAX_WAITING_PROGRESS:
            self._dropped += 1
            return
        self._progress.append((tenant, batch, event))
        self._begin()

    async def flush(self) -> None:
        """Publish all events that were added, if Redis answers."""
        # A cancelled write may already be in Redis, and would be repeated.
        await asyncio.shield(self._send())

    def _begin(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = begin_shared(self._send_regularly(), "publish-events")

    async def _send_all(self, buffer: RunEventBuffer) -> None:
        """Publish the events of the buffer until the buffer is empty."""
        while buffer.has_pending:
            check_cancelled()
            await self._send()
            if buffer.has_pending:
                await asyncio.sleep(EVERY_S)

    async def _send_regularly(self) -> None:
        """Publish all events at regular intervals, until no run has a buffer and no event waits."""
        while self._buffers or self._progress:
            check_cancelled()
            await asyncio.sleep(EVERY_S)
            await self._send()

    async def _send(self) -> None:
        """Publish the buffered events, if Redis answers."""
        # The lock keeps two senders from publishing the same events.
        async with self._one_at_a_time:
            is_more = True
            while is_more:
                buffers = [(buffer, batch) for buffer in self._buffers if (batch := buffer.take()) is not None]
                progress = self._progress[:PROGRESS_AT_ONCE]
                try:
                    answers = await self._store.append([batch for _, batch in buffers], progress)
                except BrokerUnavailable as error:
                    log.warning(
                        "events_not_published",
                        runs=len(buffers),
                        waiting=len(self._progress),
                        dropped=self._dropped,
                        error=str(error),
                    )
                    return
                for (buffer, batch), is_ours in zip(buffers, answers, strict=True):
                    buffer.confirm(len(batch.events), is_ours=is_ours)
                del self._progress[: len(progress)]
                is_more = bool(self._progress)
