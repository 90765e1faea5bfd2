"""One event type per thing worth telling of a run. Feeds the terminal, the log, `--json`, and whoever passes
`on_event`.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contract.calls import Clocks, ToolCall, ToolResult
from orchestrator.dialects.model import Message, ModelRequest, Usage


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
class ModelAsked(RunEvent):
    """A request is on its way to the model; one that fails is followed by another. `request` is the loop's own: not to
    be changed.
    """

    step: int
    request: ModelRequest

    def to_json(self) -> dict[str, Any]:
        """How much was sent, not all of it: each request holds the ones before it (a trace has them,
        docs/traces.md).
        """
        counts = {"messages": len(self.request.messages), "tools": len(self.request.tools)}
        return {"type": type(self).__name__, "run": self.run, "at": self.at, "step": self.step, **counts}


@dataclass(frozen=True, kw_only=True)
class ModelAnswered(RunEvent):
    """A reply has been read to its end, or was given up in the middle. `model_s`: since it was asked for, without the
    calls that ran meanwhile.
    """

    step: int
    message: Message
    finish_reason: str | None
    usage: Usage
    model_s: float


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
class ApprovalAsked(RunEvent):
    """A call waits for somebody's yes, until `expires_at` (Unix seconds)."""

    call: ToolCall
    digest: str
    reason: str
    warning: str
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class ApprovalDecided(RunEvent):
    """The answer to it, or that there was none. `is_changed`: allowed with other arguments than those that were asked
    about.
    """

    call_id: str
    digest: str
    is_allowed: bool
    reason: str
    is_changed: bool = False


@dataclass(frozen=True, kw_only=True)
class CallSent(RunEvent):
    """A call goes to the pool: its arguments are those that are run, completed, and changed where an approver did."""

    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class SandboxReady(RunEvent):
    """The session that the run's calls go to. `start_s`: how long its sandbox took; `sandbox`: its id, "" when that is
    not known yet.
    """

    session: str
    host: str
    image: str
    network: str
    sandbox: str = ""
    generation: int = 1
    start_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SandboxClosed(RunEvent):
    """The run's own session has been closed."""

    session: str


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
