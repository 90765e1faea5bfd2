"""One event type per thing worth telling of a run. Feeds the terminal, the log, `--json`, and whoever passes `on_event`."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contract.calls import Clocks, ToolCall, ToolResult
from orchestrator.models.base import Usage


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Base: which run, and when (Unix seconds)."""

    run: str
    at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the event's name as `type`."""
        data = {name: _plain(getattr(self, name)) for name in (f.name for f in dataclasses.fields(self))}
        return {"type": type(self).__name__, **data}


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    instruction: str
    model: str
    dialect: str


@dataclass(frozen=True, kw_only=True)
class StepStarted(RunEvent):
    step: int


@dataclass(frozen=True, kw_only=True)
class TextArrived(RunEvent):
    """A piece of the model's text, as it comes."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TextWithdrawn(RunEvent):
    """The reply broke off and came again with other words: the last `characters` of the step's text are void."""

    characters: int


@dataclass(frozen=True, kw_only=True)
class CallStarted(RunEvent):
    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class OutputArrived(RunEvent):
    """A piece of a running call's output, as it comes. The result that follows has the whole of it."""

    call_id: str
    stream: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CallFinished(RunEvent):
    result: ToolResult


@dataclass(frozen=True, kw_only=True)
class StepFinished(RunEvent):
    step: int
    model_s: float
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Warned(RunEvent):
    message: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(RunEvent):
    answer: str
    stop_reason: str
    clocks: Clocks
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunAborted(RunEvent):
    """The run ended without a result: it was cancelled, or its model could not be asked."""

    reason: str


OnEvent = Callable[[RunEvent], None]


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
