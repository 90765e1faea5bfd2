"""Progress of a run, built from its event stream: steps with their text, calls, output and results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.calls import ToolCall, ToolResult
from contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    CallSent,
    CallStarted,
    EventsMissed,
    EventsOmitted,
    ModelAnswered,
    OutputArrived,
    RunEnded,
    RunEvent,
    RunResumed,
    StepFinished,
    StepStarted,
    TextArrived,
    TextWithdrawn,
    Warned,
    parse_event,
)

_OF_STEPS = (
    TextArrived | TextWithdrawn | ModelAnswered | StepFinished | Warned | CallStarted | CallSent | ApprovalAsked
    | ApprovalDecided | OutputArrived | CallFinished
)  # fmt: skip
LIVE_CHARS = 16_384
"""Limit of the shown output of a running call.

Only the end of the output is shown, with the number of characters before it.
"""


@dataclass
class CallView:
    """A call. `result`: None while the call runs. `seen`: number of received characters of output."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    seen: int = 0
    question: ApprovalAsked | None = None
    decision: ApprovalDecided | None = None
    result: ToolResult | None = None
    is_sent: bool = False
    is_cut: bool = False

    @property
    def state(self) -> str:
        """Return the state as the page shows it."""
        if self.result is not None:
            return "succeeded" if self.result.success else "failed"
        if self.question is not None and self.decision is None:
            return "waiting for approval"
        return "running" if self.is_sent else "waiting"

    @property
    def hidden(self) -> int:
        """Return the number of output characters before the shown output."""
        return self.seen - len(self.output)


@dataclass
class StepView:
    """A step. `at`: the start time."""

    attempt: int
    number: int
    at: float
    text: str = ""
    calls: dict[str, CallView] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    model_s: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    is_over: bool = False

    @property
    def id(self) -> str:
        """Return the id of the HTML element that shows the step."""
        return f"step-{self.attempt}-{self.number}"


class RunStory:
    """Steps of a run so far, and which of them changed since the last `take_changed`."""

    def __init__(self) -> None:
        self.steps: dict[str, StepView] = {}
        self.notes: list[str] = []
        self.is_ended = False
        self._changed: dict[str, StepView] = {}
        self._now: StepView | None = None

    def take_changed(self) -> list[StepView]:
        """Return the changed steps and reset the list of changes."""
        changed = list(self._changed.values())
        self._changed = {}
        return changed

    def add(self, text: str) -> None:
        """Add one event of the stream. An event of an unknown type, from a later release, changes nothing."""
        data = json.loads(text)
        try:
            event = parse_event(data)
        except ValueError:
            # The stream keeps only the type of an event that is too large.
            self.notes.append(f"A {data.get('type')} event was too large for the stream. The transcript has it.")
            return
        match event:
            case RunResumed():
                self._resume(event.attempt, event.step)
            case EventsMissed():
                self.notes.append("Earlier events are no longer stored. The transcript has them.")
            case EventsOmitted():
                self.notes.append(
                    f"{event.count} pieces of text or output were not stored while Redis did not answer. The "
                    "transcript has them."
                )
            case RunEnded():
                self._end()
            case StepStarted():
                self._begin(event.attempt, event.step, event.at)
            case _ if isinstance(event, _OF_STEPS):
                self._in_step(event, is_cut=bool(data.get("is_cut")))

    def _begin(self, attempt: int, number: int, at: float) -> None:
        step = StepView(attempt, number, at)
        self.steps[step.id] = self._changed[step.id] = self._now = step

    def _resume(self, attempt: int, number: int) -> None:
        for step in list(self.steps.values()):
            if step.attempt == attempt and step.number >= number:
                del self.steps[step.id]
                self._changed.pop(step.id, None)
        self._now = None
        self.notes.append(f"Another orchestrator continued the run from step {number}.")

    def _end(self) -> None:
        self.is_ended = True
        for step in self.steps.values():
            if not step.is_over:
                step.is_over = True
                self._changed[step.id] = step

    def _in_step(self, event: RunEvent, *, is_cut: bool) -> None:
        if self._now is None:
            # The event of the step's start is no longer stored.
            self._begin(event.attempt, getattr(event, "step", 0), event.at)
        step = self._now
        assert step is not None
        self._changed[step.id] = step
        match event:
            case TextArrived():
                step.text += event.text
            case TextWithdrawn():
                step.text = step.text[: max(0, len(step.text) - event.characters)]
            case ModelAnswered():
                step.model_s = event.model_s
                content = event.message.get("content")
                step.text = step.text or (content if isinstance(content, str) else "")
            case StepFinished():
                step.is_over = True
                step.model_s = event.model_s
                step.tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            case Warned():
                step.warnings.append(event.message)
            case CallStarted() | CallSent() | ApprovalAsked():
                call = self._call_of(step, event.call)
                call.is_sent |= isinstance(event, CallSent)
                call.question = event if isinstance(event, ApprovalAsked) else call.question
                call.is_cut |= is_cut
            case ApprovalDecided() if event.call_id in step.calls:
                step.calls[event.call_id].decision = event
            case OutputArrived() if event.call_id in step.calls:
                call = step.calls[event.call_id]
                call.seen += len(event.text)
                call.output = (call.output + event.text)[-LIVE_CHARS:]
            case CallFinished():
                result = event.result
                call = step.calls.setdefault(result.call_id, CallView(result.call_id, result.name))
                call.result = result
                call.is_cut |= is_cut

    @staticmethod
    def _call_of(step: StepView, call: ToolCall) -> CallView:
        """Return the view of a call, with its latest arguments."""
        view = step.calls.setdefault(call.id, CallView(call.id, call.name))
        view.arguments = call.arguments
        return view
