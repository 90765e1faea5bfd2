"""Publishes the events of the hosted runs that this process owns.

Pieces of text are collected for a short time, so that a fast model causes only a few events per second.

Invariant: an owner of a run publishes each event exactly once and in order. Each event batch carries the token of the
claim and the number of its first event. Redis skips repeated events, and rejects the batch of a process that lost the
run. The next owner publishes the unfinished step again, after a RunResumed event.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from contract.errors import BrokerUnavailable
from contract.run_events import (
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
from store.connection import RedisClient
from store.run_events import EventBatch, RunEventStore, build_event
from store.tasks import begin_shared, check_cancelled, retry_until_available
from telemetry.logs import get_logger

log = get_logger(__name__)

EVERY_S = 0.1
AT_ONCE = 64
MAX_PIECE_CHARS = 4000
MAX_OUTPUT_CHARS = 256 * 1024
"""Limit of the published output of one call while the call runs, in characters."""
MAX_BUFFERED_CHARS = 4 * 1024 * 1024
"""Limit of the buffered text of one run while Redis does not answer, in characters. Above the limit, pieces of text
and output are omitted, and an event reports the omission.
"""
FINAL_SEND_S = 1.0
"""Time to publish the last events of a run that this process loses, in seconds."""

Piece = tuple[str, ...]
"""Key of pieces that belong together: pieces of one text, or of one output stream of a call."""


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
        """Note that an earlier owner has published events. The events after the last complete step are then invalid."""
        self._add(self._fields(RunResumed(run=self.run, step=self.published_step + 1)))

    def on_event(self, event: RunEvent) -> None:
        """Add an event to the buffer. Returns at once."""
        if isinstance(event, StepStarted):
            self._step = event.step
        if self._step > self.published_step:
            self._note(event)
        if isinstance(event, StepFinished):
            self._step = event.step + 1

    def _note(self, event: RunEvent) -> None:
        """Add an event of a step that is not published yet."""
        if isinstance(event, TextArrived):
            self._add_piece(event, ("text",), event.text)
        elif isinstance(event, OutputArrived):
            self._note_output(event)
        else:
            if isinstance(event, ApprovalAsked):
                self._asking.add(event.digest)
            elif isinstance(event, ApprovalDecided):
                self._asking.discard(event.digest)
            self._add(self._fields(event))

    def _note_output(self, event: OutputArrived) -> None:
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

    def take(self) -> "PendingEvents | None":
        """Return the events to publish next; None if there are none."""
        if not self.has_pending:
            return None
        # A piece that is being published must not grow: the new text would be confirmed without being sent.
        self._open.clear()
        if self._omitted:
            self._pending.append(self._fields(EventsOmitted(run=self.run, count=self._omitted)))
            self._omitted = 0
        page = self._pending[:AT_ONCE]
        steps = [fields["step"] for fields in page if fields["type"] == StepFinished.__name__]
        events = [build_event(fields) for fields in page]
        event_batch = EventBatch(
            self.tenant, self.run, self.claim, self._first, events, max(steps, default=None), len(self._asking)
        )
        return PendingEvents(event_batch, len(page))

    def confirm(self, pending: "PendingEvents", *, is_ours: bool) -> None:
        """Remove published events from the buffer. `is_ours` False: note that another process owns the run."""
        self.is_taken = not is_ours
        done = self._pending[: pending.count]
        del self._pending[: pending.count]
        self._first += pending.count
        self._chars -= sum(
            len(fields["text"]) for fields in done if fields["type"] in (TextArrived.__name__, OutputArrived.__name__)
        )


@dataclass(frozen=True)
class PendingEvents:
    """Events that are being published. `count`: number of buffer entries that these events represent."""

    event_batch: EventBatch
    count: int


class RunEventPublisher:
    """Publishes the events of all runs of one process.

    A running run does not wait for its events. At its end the run waits until all events are published, even if Redis
    does not answer for a long time.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._fields = RunEventStore(client, deployment)
        self._buffers: list[RunEventBuffer] = []
        self._sending: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    @asynccontextmanager
    async def open(self, tenant: str, run: str, claim: str, attempt: int) -> AsyncIterator[RunEventBuffer]:
        """Yield the event buffer of a run that was claimed with that token.

        Raises BrokerUnavailable: Redis does not answer for a long time.
        """
        step, has_any = await retry_until_available(lambda: self._fields.progress(tenant, run))
        buffer = RunEventBuffer(tenant, run, claim, attempt, published_step=step)
        if has_any:
            buffer.resume()
        self._buffers.append(buffer)
        if self._sending is None or self._sending.done():
            self._sending = begin_shared(self._send_regularly(), "publish-events")
        try:
            yield buffer
        except asyncio.CancelledError:
            # The run ends, or returns to the queue and its last step is published again. A short attempt is enough.
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

    async def _send_all(self, buffer: RunEventBuffer) -> None:
        """Publish the events of the buffer until the buffer is empty."""
        while buffer.has_pending:
            check_cancelled()
            await self._send()
            if buffer.has_pending:
                await asyncio.sleep(EVERY_S)

    async def _send_regularly(self) -> None:
        """Publish the events of all runs at regular intervals, until no run has a buffer."""
        while self._buffers:
            check_cancelled()
            await asyncio.sleep(EVERY_S)
            await self._send()

    async def _send(self) -> None:
        """Publish the buffered events of all runs, if Redis answers."""
        # The lock keeps two senders from publishing the same events.
        async with self._one_at_a_time:
            batches = [(buffer, pending) for buffer in self._buffers if (pending := buffer.take()) is not None]
            try:
                answers = await self._fields.append([pending.event_batch for _, pending in batches]) if batches else []
            except BrokerUnavailable as error:
                log.warning("events_not_published", runs=len(batches), error=str(error))
                return
            for (buffer, pending), is_ours in zip(batches, answers, strict=True):
                buffer.confirm(pending, is_ours=is_ours)
