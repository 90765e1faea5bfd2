"""Counts the events of one agent run, for the metrics."""

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
from toolcrew.orchestrator.dispatch.middleware import CallMeter
from toolcrew.orchestrator.runs.journal import RunJournal


class RunMeter:
    """Meter of one run. The events that its `journal` replays are already counted."""

    def __init__(self, calls: CallMeter, journal: RunJournal) -> None:
        self._counts = calls.counts
        self._calls = calls
        self._journal = journal
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
            case ModelAnswered() if not self._journal.is_catching_up:
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
            case RunAborted() if not self._journal.is_durable:
                # A durable run continues in another process.
                self._count_end("aborted")

    def _count_finished(self, event: CallFinished) -> None:
        """Count a finished call that no worker got. The dispatcher has counted the others."""
        result = event.result
        if result.call_id in self._sent:
            self._sent.discard(result.call_id)
        elif result.error_code is not None and not self._journal.is_catching_up:
            self._calls.count_unsent(result.name, result.error_code)

    def _count_end(self, stop_reason: str) -> None:
        self._counts.count(RUNS_ENDED, stop_reason)
        self._counts.observe(ITERATIONS, self._steps)
