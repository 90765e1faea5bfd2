"""Steps of a run, built from its events in order. The events are those of a trace or of the stream of a run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallFinished,
    CallSent,
    CallStarted,
    ModelAnswered,
    ModelAsked,
    OutputArrived,
    RunEvent,
    StepFinished,
    StepStarted,
    TextArrived,
    TextWithdrawn,
    Warned,
)
from toolcrew.orchestrator.dialects.model import Message

LIVE_CHARS = 16_384
"""Limit of the stored output of a running call, in characters. Only the end of the output is stored."""
_OF_CALLS = CallStarted | CallSent | ApprovalAsked | ApprovalDecided | OutputArrived | CallFinished
_OF_STEPS = StepStarted | ModelAsked | ModelAnswered | TextArrived | TextWithdrawn | StepFinished | Warned | _OF_CALLS


@dataclass
class RunCall:
    """A call of a step, with its events. A malformed call has only the event `finished`. An interrupted call has no
    `finished`.

    `output`: the end of the output so far, without the first `hidden` characters. `is_cut`: an event has only the
    beginning of a text.
    """

    call_id: str
    started: CallStarted | None = None
    approval_request: ApprovalAsked | None = None
    approval_decision: ApprovalDecided | None = None
    sent: CallSent | None = None
    finished: CallFinished | None = None
    output: str = ""
    hidden: int = 0
    is_cut: bool = False

    @property
    def result(self) -> ToolResult | None:
        """Return the result of the call; None if the call did not end."""
        return self.finished.result if self.finished else None

    @property
    def tool(self) -> str:
        """Return the name of the tool, as the model wrote the name."""
        event = self.started or self.sent or self.approval_request
        return event.call.name if event else self.result.name if self.result else "unknown"

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the call that ran. If the call did not run, return the arguments of the model."""
        event = self.sent or self.started or self.approval_request
        return event.call.arguments if event else {}

    @property
    def state(self) -> str:
        """Return the state as a page shows it."""
        if self.result is not None:
            return "succeeded" if self.result.success else "failed"
        if self.approval_request is not None and self.approval_decision is None:
            return "waiting for approval"
        return "running" if self.sent is not None else "waiting"

    @property
    def seconds(self) -> float | None:
        """Return how long the call took, in seconds; None if the call did not start or end."""
        if self.started is None or self.finished is None:
            return None
        # In a resumed run the logged result arrives at once, so the time between the events is too short. The durations
        # in the result are the real ones.
        return max(self.finished.result.clocks.total_s, self.finished.at - self.started.at)

    @property
    def has_run(self) -> bool:
        """Return whether the result shows that the call ran, even if the trace has lost the event `sent`."""
        return self.result is not None and (self.result.sandbox is not None or self.result.clocks.total_s > 0)

    @property
    def was_refused(self) -> bool:
        """Return whether a policy or a person refused the call."""
        return self.result is not None and bool(self.result.metadata.get("was_refused"))

    def add(self, event: RunEvent) -> None:
        """Store an event of the call. The first of several approvals or sent calls is stored."""
        match event:
            case CallStarted():
                self.started = event
            case ApprovalAsked():
                self.approval_request = self.approval_request or event
            case ApprovalDecided():
                self.approval_decision = self.approval_decision or event
            case CallSent():
                self.sent = self.sent or event
            case OutputArrived():
                output = self.output + event.text
                self.output = output[-LIVE_CHARS:]
                self.hidden += len(output) - len(self.output)
            case CallFinished():
                self.finished = event


@dataclass
class RunStep:
    """A request with its reply and calls. `number` 0: the start of the step is missing. `at`: the start time.

    `messages`: all messages of the request, if its event has them. `reply` None: there is no reply. `text`: the text of
    the reply, complete or still arriving.
    """

    number: int
    attempt: int = 1
    at: float = 0.0
    request: ModelAsked | None = None
    messages: list[Message] = field(default_factory=list)
    reply: ModelAnswered | None = None
    finished: StepFinished | None = None
    text: str = ""
    calls: dict[str, RunCall] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def id(self) -> str:
        """Return the id of the HTML element that shows the step."""
        return f"step-{self.attempt}-{self.number}"

    @property
    def model_s(self) -> float:
        """Return how long the model took, in seconds; 0 if it is not known yet."""
        event = self.finished or self.reply
        return event.model_s if event else 0.0

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the tokens of the request and of the reply; 0 if they are not known yet."""
        usage = self.finished.usage if self.finished else None
        return (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)


class RunSteps:
    """The steps of a run so far, by their ids."""

    def __init__(self, events: Iterable[RunEvent] = ()) -> None:
        self.steps: dict[str, RunStep] = {}
        self._now: RunStep | None = None
        self._messages: list[Message] = []
        for event in events:
            self.add(event)

    def add(self, event: RunEvent, *, is_cut: bool = False) -> RunStep | None:
        """Add an event. Return the step that the event belongs to; None if it belongs to no step. `is_cut`: the event
        has only the beginning of a text.
        """
        if not isinstance(event, _OF_STEPS):
            return None
        number = getattr(event, "step", self._now.number if self._now is not None else 0)
        if self._now is None or self._now.number != number or isinstance(event, StepStarted):
            self._now = RunStep(number, event.attempt, event.at)
            self.steps[self._now.id] = self._now
        step = self._now
        match event:
            case ModelAsked():
                # A repeated request belongs to the same step, which has the messages of the last request.
                self._messages = [*self._messages[: event.kept], *event.new_messages]
                step.request, step.messages = event, self._messages
            case ModelAnswered():
                step.reply = event
                content = event.message.get("content")
                step.text = step.text or (content if isinstance(content, str) else "")
            case TextArrived():
                # Python extends a text in place only if nothing else refers to it. Otherwise it copies all for each
                # piece, and a long reply has thousands of pieces.
                text, step.text = step.text, ""
                text += event.text
                step.text = text
            case TextWithdrawn():
                step.text = step.text[: max(0, len(step.text) - event.characters)]
            case StepFinished():
                step.finished, step.is_over = event, True
            case Warned():
                step.warnings.append(event.message)
            case _ if isinstance(event, _OF_CALLS):
                self._add_to_call(step, event, is_cut)
        return step

    def void(self, attempt: int, number: int) -> None:
        """Remove the steps of an attempt from `number` on, because the process that continues the run publishes their
        events again.
        """
        self.steps = {step.id: step for step in self.steps.values() if step.attempt != attempt or step.number < number}
        self._now = None

    @staticmethod
    def _add_to_call(step: RunStep, event: _OF_CALLS, is_cut: bool) -> None:
        call_id = call_id_of(event)
        # Add the call if its start is missing. An event about a decision or output alone is not enough.
        if call_id not in step.calls and not isinstance(event, ApprovalDecided | OutputArrived):
            step.calls[call_id] = RunCall(call_id)
        if (call := step.calls.get(call_id)) is not None:
            call.add(event)
            call.is_cut |= is_cut


def call_id_of(event: _OF_CALLS) -> str:
    """Return the id of the call that an event refers to."""
    match event:
        case ApprovalDecided() | OutputArrived():
            return event.call_id
        case CallFinished():
            return event.result.call_id
        case _:
            return event.call.id
