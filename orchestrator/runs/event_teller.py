"""Tells the events of the runs that this process works: gathered for a moment, so that a model that writes fast is some
pieces a second.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from contract.errors import BrokerUnavailable
from orchestrator.loop.events import (
    ApprovalAsked,
    ApprovalDecided,
    OutputArrived,
    RunEvent,
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
"""Of the output of one call that is told while it runs."""
MAX_UNTOLD_CHARS = 4 * 1024 * 1024
"""Of one run, while Redis is away: beyond, pieces of text and output are left out, and that is told."""
LAST_WORDS_S = 1.0
"""So long a run that is taken from this process may need to have its last events told."""

Piece = tuple[str, ...]
"""What pieces belong together: of one text, or of one stream of a call's output."""


@dataclass
class RunTeller:
    """The events of one run as its holder tells them. What was told of earlier steps before, by a process that died, is
    not told again.
    """

    tenant: str
    run: str
    claim: str
    attempt: int
    told_step: int = 0
    """The last step that is told whole."""
    _untold: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[Piece, dict[str, Any]] = field(default_factory=dict)
    _step: int = 1
    _first: int = 0
    _chars: int = 0
    _output: dict[str, int] = field(default_factory=dict)
    _asking: set[str] = field(default_factory=set)
    _omitted: int = 0
    is_taken: bool = False

    def resume(self) -> None:
        """Somebody has told of the run before: what he told of the steps from the next one on is void."""
        self._add(
            {
                "type": "RunResumed",
                "run": self.run,
                "at": time.time(),
                "step": self.told_step + 1,
                "attempt": self.attempt,
            }
        )

    def on_event(self, event: RunEvent) -> None:
        """Returns at once."""
        if isinstance(event, StepStarted):
            self._step = event.step
        if self._step > self.told_step:
            self._note(event)
        if isinstance(event, StepFinished):
            self._step = event.step + 1

    def _note(self, event: RunEvent) -> None:
        if isinstance(event, TextArrived):
            self._add_piece(event, ("text",), event.text)
        elif isinstance(event, OutputArrived):
            self._note_output(event)
        else:
            if isinstance(event, ApprovalAsked):
                self._asking.add(event.digest)
            elif isinstance(event, ApprovalDecided):
                self._asking.discard(event.digest)
            self._add(self._told(event))

    def _note_output(self, event: OutputArrived) -> None:
        told = self._output.get(event.call_id, 0)
        self._output[event.call_id] = told + len(event.text)
        if told + len(event.text) <= MAX_OUTPUT_CHARS:
            self._add_piece(event, (event.call_id, event.stream), event.text)
        elif told <= MAX_OUTPUT_CHARS:
            # Once: the result has the whole of it.
            self._add(
                {
                    "type": "OutputOmitted",
                    "run": self.run,
                    "at": event.at,
                    "attempt": self.attempt,
                    "call_id": event.call_id,
                }
            )

    def _add_piece(self, event: RunEvent, piece: Piece, text: str) -> None:
        if self._chars + len(text) > MAX_UNTOLD_CHARS:
            self._omitted += 1
            return
        self._chars += len(text)
        known = self._open.get(piece)
        if known is not None and len(known["text"]) + len(text) <= MAX_PIECE_CHARS:
            known["text"] += text
            return
        for at in range(0, len(text), MAX_PIECE_CHARS):
            told = {**self._told(event), "text": text[at : at + MAX_PIECE_CHARS]}
            self._untold.append(told)
            self._open[piece] = told

    def _add(self, told: dict[str, Any]) -> None:
        self._open.clear()
        self._untold.append(told)

    def _told(self, event: RunEvent) -> dict[str, Any]:
        # Of an attempt after the first the loop has another name for the run.
        return {**event.to_json(), "run": self.run, "attempt": self.attempt}

    @property
    def has_untold(self) -> bool:
        return bool(self._untold) and not self.is_taken

    def take(self) -> "Taken | None":
        """What there is to tell; None: nothing."""
        if not self.has_untold:
            return None
        self._open.clear()
        if self._omitted:
            self._untold.append({"type": "EventsOmitted", "run": self.run, "at": time.time(), "count": self._omitted})
            self._omitted = 0
        some = self._untold[:AT_ONCE]
        steps = [told["step"] for told in some if told["type"] == StepFinished.__name__]
        events = [build_event(told) for told in some]
        telling = EventBatch(
            self.tenant, self.run, self.claim, self._first, events, max(steps, default=None), len(self._asking)
        )
        return Taken(telling, len(some))

    def note_told(self, taken: "Taken", *, is_ours: bool) -> None:
        """They are in the stream, or the run is somebody else's."""
        self.is_taken = not is_ours
        done = self._untold[: taken.count]
        del self._untold[: taken.count]
        self._first += taken.count
        self._chars -= sum(
            len(told["text"]) for told in done if told["type"] in (TextArrived.__name__, OutputArrived.__name__)
        )


@dataclass(frozen=True)
class Taken:
    """What is being told of a run. `count`: so many of its events."""

    telling: EventBatch
    count: int


class EventTellers:
    """Those of one process. A run is never held up by its events; at its end they are told, however long Redis is
    away.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._told = RunEventStore(client, deployment)
        self._tellers: list[RunTeller] = []
        self._telling: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    @asynccontextmanager
    async def open(self, tenant: str, run: str, claim: str, attempt: int) -> AsyncIterator[RunTeller]:
        """Around the work on a run that was claimed under that word. Raises BrokerUnavailable when Redis is away for
        long.
        """
        step, has_any = await retry_until_available(lambda: self._told.progress(tenant, run))
        teller = RunTeller(tenant, run, claim, attempt, told_step=step)
        if has_any:
            teller.resume()
        self._tellers.append(teller)
        if self._telling is None or self._telling.done():
            self._telling = begin_shared(self._tell_regularly(), "tell-events")
        try:
            yield teller
        except asyncio.CancelledError:
            # It goes back, where the last step is told again, or it ends, which is all that is to be known.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._tell()
            raise
        except Exception:
            await self._until_told(teller)
            raise
        else:
            await self._until_told(teller)
        finally:
            self._tellers.remove(teller)

    async def _until_told(self, teller: RunTeller) -> None:
        while teller.has_untold:
            check_cancelled()
            await self._tell()
            if teller.has_untold:
                await asyncio.sleep(EVERY_S)

    async def _tell_regularly(self) -> None:
        while self._tellers:
            check_cancelled()
            await asyncio.sleep(EVERY_S)
            await self._tell()

    async def _tell(self) -> None:
        """Tell what there is of all runs, if Redis answers."""
        async with self._one_at_a_time:
            some = [(teller, taken) for teller in self._tellers if (taken := teller.take()) is not None]
            try:
                answers = await self._told.append([taken.telling for _, taken in some]) if some else []
            except BrokerUnavailable as error:
                log.warning("events_not_told", runs=len(some), error=str(error))
                return
            for (teller, taken), is_ours in zip(some, answers, strict=True):
                teller.note_told(taken, is_ours=is_ours)
