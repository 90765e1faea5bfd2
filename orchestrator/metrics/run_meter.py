"""Counts the events of one agent run, for the metrics."""

from typing import Protocol

from toolcrew.contract.metrics import APPROVALS, APPROVALS_ASKED, ITERATIONS, MODEL_SECONDS, RUNS_ENDED, TOKENS
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    CallSent,
    ModelAnswered,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    StepStarted,
)
from toolcrew.orchestrator.metrics.call_meter import CallMeter
from toolcrew.store.metrics import Counts


class Replay(Protocol):
    """The part of a durable run's journal (orchestrator/runs/journal.py) that the meter reads. While the journal is
    catching up, the events of the run come from its log and were counted before.
    """

    @property
    def is_catching_up(self) -> bool: ...


class RunMeter:
    """Meter of one run. `replay`: the journal of a durable run, whose replayed events are already counted; None: the
    run is not durable.
    """

    def __init__(self, counts: Counts, calls: CallMeter, replay: Replay | None) -> None:
        self._counts = counts
        self._calls = calls
        self._replay = replay
        self._model = ""
        self._steps = 0
        self._sent: set[str] = set()

    def on_event(self, event: RunEvent) -> None:
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
            case RunAborted() if self._replay is None:
                # Only a run without a journal has ended. A durable run continues in another process.
                self._count_end("aborted")

    def _is_replay(self) -> bool:
        return self._replay is not None and self._replay.is_catching_up

    def _count_finished(self, event: CallFinished) -> None:
        """Count a finished call that no worker got. The dispatcher has counted the others."""
        result = event.result
        if result.call_id in self._sent:
            self._sent.discard(result.call_id)
        elif result.error_code is not None and not self._is_replay():
            self._calls.count_unsent(result.name, result.error_code)

    def _count_end(self, stop_reason: str) -> None:
        self._counts.count(RUNS_ENDED, stop_reason)
        self._counts.observe(ITERATIONS, self._steps)
