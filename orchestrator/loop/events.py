"""The events of a run: one vocabulary for `on_event`, the terminal, `--json`, the event stream of the HTTP API and
traces.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from contract.calls import Clocks, ToolCall, ToolResult
from orchestrator.dialects.model import Message, ModelRequest, Usage


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Base of all events. `at`: Unix seconds."""

    # Pydantic reads it when it parses an event.
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    run: str
    at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the name of the class as `type`."""
        data = {name: _plain(getattr(self, name)) for name in (f.name for f in dataclasses.fields(self))}
        return {"type": type(self).__name__, **data}

    def to_trace(self) -> dict[str, Any]:
        """Return what a trace stores: the fields of `to_json`, and those that are too large for a stream."""
        return self.to_json()


@cache
def _find_release() -> str:
    try:
        return version("toolcrew")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """Begins each attempt of a run."""

    instruction: str
    model: str
    dialect: str
    release: str = field(default_factory=_find_release)


@dataclass(frozen=True, kw_only=True)
class StepStarted(RunEvent):
    step: int


@dataclass(frozen=True, kw_only=True)
class ModelAsked(RunEvent):
    """A request of so many `messages` and `tools` is sent to the model. If it fails, another one follows.

    Its messages are the first `kept` ones of the request before it in the run, then `new_messages`. `new_tools`: the
    tool definitions; None if they are those of the request before it. The lists belong to the loop: do not change them.
    """

    step: int
    messages: int
    tools: int
    kept: int = 0
    new_messages: list[Message] = field(default_factory=list)
    new_tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, run: str, step: int, request: ModelRequest, before: ModelRequest) -> "ModelAsked":
        """Return the event of a request as its difference to the one before."""
        pairs = zip(before.messages, request.messages, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return cls(
            run=run,
            step=step,
            messages=len(request.messages),
            tools=len(request.tools),
            kept=kept,
            new_messages=request.messages[kept:],
            new_tools=request.tools if request.tools != before.tools else None,
            extra=request.extra,
        )

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_trace().items() if name not in _TRACE_ONLY}

    def to_trace(self) -> dict[str, Any]:
        return super().to_json()


_TRACE_ONLY = ("kept", "new_messages", "new_tools", "extra")


@dataclass(frozen=True, kw_only=True)
class ModelAnswered(RunEvent):
    """A reply was read to its end, or was interrupted. `model_s`: seconds since the request, without the calls that ran
    during the reply.
    """

    step: int
    message: Message
    finish_reason: str | None
    usage: Usage
    model_s: float


@dataclass(frozen=True, kw_only=True)
class TextArrived(RunEvent):
    """A piece of the model's text arrived."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TextWithdrawn(RunEvent):
    """The reply was interrupted and came again with another text: the last `characters` of the step's text are void."""

    characters: int


@dataclass(frozen=True, kw_only=True)
class CallStarted(RunEvent):
    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class ApprovalAsked(RunEvent):
    """A call waits for an approval, until `expires_at` (Unix seconds)."""

    call: ToolCall
    digest: str
    reason: str
    warning: str
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class ApprovalDecided(RunEvent):
    """The decision about a call, or that there was none. `is_changed`: the approver changed the arguments."""

    call_id: str
    digest: str
    is_allowed: bool
    reason: str
    is_changed: bool = False


@dataclass(frozen=True, kw_only=True)
class CallSent(RunEvent):
    """A call is sent to the pool. Its arguments are those that run: completed, and changed if an approver changed
    them.
    """

    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class SandboxReady(RunEvent):
    """The session of the run's calls is open. `start_s`: how long its sandbox took to start; `sandbox`: its id, "" if
    it is not known yet.
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
    """The run's own session was closed."""

    session: str


@dataclass(frozen=True, kw_only=True)
class OutputArrived(RunEvent):
    """A piece of a running call's output arrived. The result that follows has all of it."""

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
    """The run ended without a result: it was cancelled, or its model did not answer."""

    reason: str


OnEvent = Callable[[RunEvent], None]
_TYPES = {kind.__name__: kind for kind in RunEvent.__subclasses__()}


def parse_event(data: Mapping[str, Any]) -> RunEvent | None:
    """Return the event that `to_json` or `to_trace` wrote; None if this release does not know its type.

    Unknown fields are ignored. Raises ValueError for data that is not an event.
    """
    name = data.get("type")
    if not isinstance(name, str):
        raise ValueError("the data is not an event: it has no type")
    return _adapter(name).validate_python(data, extra="ignore") if name in _TYPES else None


@cache
def _adapter(name: str) -> TypeAdapter[RunEvent]:
    return TypeAdapter(_TYPES[name])


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
