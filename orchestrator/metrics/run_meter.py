"""Counts what one agent run tells of itself, and hands it on."""

from typing import Protocol

from contract.metrics import APPROVALS, APPROVALS_ASKED, ITERATIONS, MODEL_SECONDS, RUNS_ENDED, TOKENS
from contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    CallSent,
    ModelAnswered,
    OnEvent,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    StepStarted,
)
from orchestrator.metrics.call_meter import CallMeter
from store.metrics import Counts


class Replay(Protocol):
    """What a run that outlives its process remembers (orchestrator/runs/journal.py)."""

    @property
    def is_catching_up(self) -> bool: ...


class RunMeter:
    """Of one run. `book` None: it is remembered by nobody; else what is told while it catches up was told, and counted,
    before.
    """

    def __init__(self, counts: Counts, calls: CallMeter, tell: OnEvent, book: Replay | None) -> None:
        self._counts = counts
        self._calls = calls
        self._tell = tell
        self._book = book
        self._model = ""
        self._steps = 0
        self._sent: set[str] = set()

    def on_event(self, event: RunEvent) -> None:
        self._count(event)
        self._tell(event)

    def _count(self, event: RunEvent) -> None:
        counts = self._counts
        match event:
            case RunStarted():
                self._model = event.model
            case StepStarted():
                self._steps += 1
            case ModelAnswered() if not self._is_replay():
                counts.count(TOKENS, self._model, "input", by=event.usage.prompt_tokens)
                counts.count(TOKENS, self._model, "output", by=event.usage.completion_tokens)
                counts.observe(MODEL_SECONDS, event.model_s, self._model)
            case CallSent():
                self._sent.add(event.call.id)
            case CallFinished():
                self._count_finished(event)
            case ApprovalAsked():
                counts.count(APPROVALS_ASKED)
            case ApprovalDecided():
                counts.count(
                    APPROVALS, "rejected" if not event.is_allowed else "modified" if event.is_changed else "approved"
                )
            case RunFinished():
                self._count_end(event.stop_reason)
            case RunAborted() if self._book is None:
                # One that is remembered goes on somewhere else.
                self._count_end("aborted")

    def _is_replay(self) -> bool:
        return self._book is not None and self._book.is_catching_up

    def _count_finished(self, event: CallFinished) -> None:
        """Who was sent to a worker has been counted where it was sent."""
        result = event.result
        if result.call_id in self._sent:
            self._sent.discard(result.call_id)
        elif result.error_code is not None and not self._is_replay():
            self._calls.count_unsent(result.name, result.error_code)

    def _count_end(self, stop_reason: str) -> None:
        self._counts.count(RUNS_ENDED, stop_reason)
        self._counts.observe(ITERATIONS, self._steps)
