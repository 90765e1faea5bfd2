"""What a run has done so far, folded out of its events: steps with their text, calls, output and results."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_OF_STEPS = {
    "TextArrived": "text", "TextWithdrawn": "characters", "ModelAnswered": "type", "StepFinished": "type",
    "Warned": "message", "CallStarted": "call", "CallSent": "call", "ApprovalAsked": "call",
    "ApprovalDecided": "call_id", "OutputArrived": "call_id", "CallFinished": "result",
}  # fmt: skip
"""Each with what it is about, which one that was too large to be kept has no more."""
LIVE_CHARS = 16_384
"""Of the output of a call that runs: its end is shown, and how much came before."""


@dataclass
class CallView:
    """One call. `result`: as its event tells it, None while there is none; `seen`: characters of output that have
    come.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    output: str = ""
    seen: int = 0
    question: Mapping[str, Any] | None = None
    decision: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    is_sent: bool = False
    is_cut: bool = False

    @property
    def state(self) -> str:
        """In a word."""
        if self.result is not None:
            return "succeeded" if self.result.get("success") else "failed"
        if self.question is not None and self.decision is None:
            return "waiting for approval"
        return "running" if self.is_sent else "waiting"

    @property
    def hidden(self) -> int:
        """How many characters of live output came before those that are shown."""
        return self.seen - len(self.output)


@dataclass
class StepView:
    """One step. `at`: when it began."""

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
        """Of the element that shows it."""
        return f"step-{self.attempt}-{self.number}"


class RunStory:
    """`changed`: steps that are not as they were when it was last taken."""

    def __init__(self) -> None:
        self.steps: dict[str, StepView] = {}
        self.notes: list[str] = []
        self.is_ended = False
        self._changed: dict[str, StepView] = {}
        self._now: StepView | None = None

    def add_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.add(text)

    def take_changed(self) -> list[StepView]:
        """The changed ones, which then count as known."""
        taken = list(self._changed.values())
        self._changed = {}
        return taken

    def add(self, text: str) -> None:
        """One event, as its stream has it. What is none of those known here changes nothing: a later release may tell
        more.
        """
        told = json.loads(text)
        kind, attempt = told.get("type"), int(told.get("attempt", 1))
        if kind == "StepStarted":
            self._begin(attempt, int(told["step"]), float(told.get("at", 0.0)))
        elif kind == "RunResumed":
            self._resume(attempt, int(told["step"]))
        elif kind == "EventsMissed":
            self.notes.append("What was told before is no longer kept: the transcript has it.")
        elif kind == "EventsOmitted":
            self.notes.append(
                f"{told.get('count', 'Some')} pieces of text or output were not told while Redis was away: the "
                "transcript has them."
            )
        elif kind == "RunEnded":
            self._end()
        elif kind in _OF_STEPS and _OF_STEPS[kind] not in told:
            self.notes.append(f"What {kind} tells was too large to be kept: the transcript has it.")
        elif kind in _OF_STEPS:
            self._in_step(kind, attempt, told)

    def _begin(self, attempt: int, number: int, at: float) -> None:
        step = StepView(attempt, number, at)
        self.steps[step.id] = self._changed[step.id] = self._now = step

    def _resume(self, attempt: int, number: int) -> None:
        for step in list(self.steps.values()):
            if step.attempt == attempt and step.number >= number:
                del self.steps[step.id]
                self._changed.pop(step.id, None)
        self._now = None
        self.notes.append(f"Another orchestrator went on with the run from step {number}.")

    def _end(self) -> None:
        self.is_ended = True
        for step in self.steps.values():
            if not step.is_over:
                step.is_over = True
                self._changed[step.id] = step

    def _in_step(self, kind: str, attempt: int, told: Mapping[str, Any]) -> None:
        if self._now is None:
            # Its begin is no longer kept.
            self._begin(attempt, int(told.get("step", 0)), float(told.get("at", 0.0)))
        step = self._now
        assert step is not None
        self._changed[step.id] = step
        match kind:
            case "TextArrived":
                step.text += str(told["text"])
            case "TextWithdrawn":
                step.text = step.text[: max(0, len(step.text) - int(told["characters"]))]
            case "ModelAnswered":
                step.model_s = float(told.get("model_s", 0.0))
                step.text = step.text or _content(told.get("message"))
            case "StepFinished":
                step.is_over = True
                step.model_s = float(told.get("model_s", 0.0))
                usage = told.get("usage") or {}
                step.tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            case "Warned":
                step.warnings.append(str(told["message"]))
            case "CallStarted" | "CallSent" | "ApprovalAsked":
                self._call_of(step, told["call"]).is_sent |= kind == "CallSent"
                if kind == "ApprovalAsked":
                    step.calls[told["call"]["id"]].question = told
                step.calls[told["call"]["id"]].is_cut |= bool(told.get("is_cut"))
            case "ApprovalDecided" if told["call_id"] in step.calls:
                step.calls[told["call_id"]].decision = told
            case "OutputArrived" if told["call_id"] in step.calls:
                call = step.calls[told["call_id"]]
                call.seen += len(told["text"])
                call.output = (call.output + told["text"])[-LIVE_CHARS:]
            case "CallFinished":
                result = told["result"]
                call = self._call_of(step, {"id": result["call_id"], "name": result["name"], "arguments": None})
                call.result = result
                call.is_cut |= bool(told.get("is_cut"))

    @staticmethod
    def _call_of(step: StepView, told: Mapping[str, Any]) -> CallView:
        """The call; its arguments as they were told last."""
        known = step.calls.setdefault(told["id"], CallView(told["id"], told["name"], {}))
        if told["arguments"] is not None:
            known.arguments = told["arguments"]
        return known


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""
