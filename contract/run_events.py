"""The events of a run: one vocabulary for its log, `on_event`, the terminal, `--json`, the event stream of the HTTP
API, traces, and the progress of a batch.

A run's log (store/run_log.py) has the events from which another process resumes the run: SessionOpening, SessionOpened,
ModelReplied, CallReviewed, CallFinished, StateForking, StateKept, ArtifactsCopied and SubmissionTaken. The event stream
of a durable run (store/run_events.py) has all others. The stream of a batch (store/batches.py) has the PROGRESS_EVENTS
of all its runs.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter

from toolcrew.contract.calls import CallUsage, Clocks, Record, ToolCall, ToolResult
from toolcrew.contract.functions.completions import TokenUsage


class FailureKind(StrEnum):
    """The origin of a run's failure. A repetition of the attempt can help only after `infrastructure`."""

    MODEL = "model"
    """The model gave no usable answer: cut, empty or malformed replies, a limit of the run, or a request that the
    model rejects.
    """
    TOOL = "tool"
    """The batch item consists of one call, and the call failed: bad arguments, a timeout, a refusal."""
    INFRASTRUCTURE = "infrastructure"
    """No sandbox, no host, no Redis, no model endpoint, a process that died."""
    INPUT = "input"
    """A name in the line of the batch file does not exist or is not allowed: a workspace, a checkpoint, a tool, or an
    image.
    """
    CANCELLED = "cancelled"
    GRADER = "grader"
    """The grader's command ended without a valid reward."""


class Failure(Record):
    """The reason why a run has no result. `code`: an error code of a call, a stop reason, or another
    code of docs/errors.md.
    """

    kind: FailureKind
    code: str
    message: str


class Grade(Record):
    """The reward of an item. `scores`: numbers that the grader reported in addition to the reward. `refusal`: why the
    artifacts were refused, which gives the reward 0; "" if the grader ran. `files`, `bytes`: artifacts that the grader
    received. `missing`: why declared artifacts were not copied.
    """

    reward: float = Field(ge=0, le=1)
    scores: dict[str, float] = Field(default_factory=dict)
    refusal: str = ""
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = Field(default=(), exclude_if=lambda missing: not missing)

    @property
    def is_solved(self) -> bool:
        """Return whether the item has the full reward."""
        return self.reward == 1


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Base of all events. `at`: Unix seconds. `attempt`: number of the attempt of the run, from 1. `item`: the
    custom_id of the run's line in the batch file; "" for a run that is not part of a batch. `wall_s`: in a log, the
    working time of the run until the event, in seconds. The setup, and the time in which no process ran the run, do not
    count.
    """

    # Pydantic uses this configuration when it parses an event.
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    run: str
    at: float = field(default_factory=time.time)
    attempt: int = 1
    item: str = ""
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the name of the class as `type`."""
        data = {name: _plain(getattr(self, name)) for name in (f.name for f in dataclasses.fields(self))}
        for name in ("item", "wall_s"):
            if not data[name]:
                del data[name]
        return {"type": type(self).__name__, **data}

    def to_trace(self) -> dict[str, Any]:
        """Return the data that a trace stores: the fields of `to_json`, and the fields that are too large for a
        stream.
        """
        return self.to_json()


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """First event of each attempt of a run."""

    instruction: str
    model: str
    dialect: str
    release: str = ""


@dataclass(frozen=True, kw_only=True)
class StepStarted(RunEvent):
    step: int


@dataclass(frozen=True, kw_only=True)
class ModelAsked(RunEvent):
    """A request with `messages` messages and `tools` tools is sent to the model. If the request fails, another
    request follows.

    The messages are the first `kept` messages of the previous request in the run, then `new_messages`, in the OpenAI
    wire format. `new_tools`: the tool definitions, or None if they equal those of the previous request. The agent loop
    uses the same list objects: do not change them.
    """

    step: int
    messages: int
    tools: int
    kept: int = 0
    new_messages: list[dict[str, Any]] = field(default_factory=list)
    new_tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_trace().items() if name not in _TRACE_ONLY}

    def to_trace(self) -> dict[str, Any]:
        return super().to_json()


_TRACE_ONLY = ("kept", "new_messages", "new_tools", "extra")


class ReplyTokens(Record):
    """The single tokens of a request and its reply, as reported by the endpoint. Each list is empty if the endpoint did
    not report it.
    """

    prompt_token_ids: tuple[int, ...] = ()
    completion_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelAnswered(RunEvent):
    """A reply was read to its end, or was interrupted. `model_s`: seconds since the request, without the calls that ran
    during the reply. `tokens` None: the endpoint reported none.
    """

    step: int
    message: dict[str, Any]
    finish_reason: str | None
    usage: TokenUsage
    model_s: float
    tokens: ReplyTokens | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_json().items() if name != "tokens"}

    def to_trace(self) -> dict[str, Any]:
        return super().to_json() if self.tokens is not None else self.to_json()


@dataclass(frozen=True, kw_only=True)
class ReplyRepaired(RunEvent):
    """A reply that would not lead on was repaired. `repair`: `code_block` if the command in the reply's code block is
    run, `reminder` if the model was asked to call a tool, `restart` if the model repeated a failed call and the next
    requests begin again with the user's request.
    """

    step: int
    repair: str


@dataclass(frozen=True, kw_only=True)
class TextArrived(RunEvent):
    """A piece of the text of a model's reply arrived."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TextWithdrawn(RunEvent):
    """The reply was interrupted and requested again, and its new text differs. The last `characters` characters of the
    step's text are void.
    """

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
    """An approver decided about a call, or there was no decision. `is_changed`: the approver changed the
    arguments.
    """

    call_id: str
    digest: str
    is_allowed: bool
    reason: str
    is_changed: bool = False


@dataclass(frozen=True, kw_only=True)
class CallSent(RunEvent):
    """A call is sent to the pool. The event has the arguments that run: with defaults filled in, and with the changes
    of an approver.
    """

    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class SandboxReady(RunEvent):
    """The session in which the run's calls run is open. `start_s`: seconds that the sandbox of the session took to
    start. `sandbox`: the id of the sandbox, "" if it is not known yet.
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
    """The session that was opened for the run was closed."""

    session: str


@dataclass(frozen=True, kw_only=True)
class OutputArrived(RunEvent):
    """A piece of a running call's output arrived. The result that follows contains the whole output."""

    call_id: str
    stream: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CallFinished(RunEvent):
    """A call has ended. Each call has exactly one event of this class, with its result. `seconds`: time from the
    request of the call to its result.
    """

    result: ToolResult
    seconds: float = 0.0

    def without_output(self) -> "CallFinished":
        """Return the event without the output of the call. The event stream of a batch stores this form."""
        result = self.result
        brief = ToolResult(
            call_id=result.call_id,
            name=result.name,
            success=result.success,
            error_code=result.error_code,
            clocks=result.clocks,
        )
        return dataclasses.replace(self, result=brief)


@dataclass(frozen=True, kw_only=True)
class StepFinished(RunEvent):
    step: int
    model_s: float
    usage: TokenUsage


@dataclass(frozen=True, kw_only=True)
class Warned(RunEvent):
    message: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(RunEvent):
    answer: str
    stop_reason: str
    clocks: Clocks
    usage: TokenUsage = field(default_factory=TokenUsage)
    cost: float | None = None
    call_usage: CallUsage = field(default_factory=CallUsage)


@dataclass(frozen=True, kw_only=True)
class RunAborted(RunEvent):
    """The run ended without a result: it was cancelled, or its model did not answer."""

    reason: str


# --- The life of a durable run ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunClaimed(RunEvent):
    """An orchestrator has claimed the run.

    `is_resumed`: another process had started this attempt and died. `waited_s`: seconds in the queue since the run
    was submitted or put back.
    """

    orchestrator: str = ""
    is_resumed: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionOpening(RunEvent):
    """The session `session` is about to be opened for the run."""

    session: str


@dataclass(frozen=True, kw_only=True)
class SessionOpened(RunEvent):
    """The run's own session is open and has its workspace. `info`: the fields of SessionInfo."""

    session: str
    info: dict[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class RunReady(RunEvent):
    """The session is ready. The limits of the run count from now on. `setup_s`: seconds since the claim of the run."""

    setup_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelReplied(RunEvent):
    """The model gave a whole reply; none of its calls has run yet. `chunks` have the OpenAI wire format, with
    adjacent chunks joined.
    """

    chunks: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class CallReviewed(RunEvent):
    """An approver decided about a call. The event has the approved call, or the result that refuses the call."""

    call_id: str
    approved: ToolCall | None = None
    refused: ToolResult | None = None


@dataclass(frozen=True, kw_only=True)
class StateForking(RunEvent):
    """The run's session is about to be forked. The new session `session` will keep the state after `step` steps."""

    step: int
    session: str


@dataclass(frozen=True, kw_only=True)
class StateKept(RunEvent):
    """The session `session` keeps the state after `step` steps; no call runs in that session. `session` "": the state
    could not be kept, for the reason in `problem`.
    """

    step: int
    session: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ArtifactsCopied(RunEvent):
    """The run's artifacts were copied, and its session is no longer needed. `missing`: a sentence for each artifact
    that was not found. `file`: id of the archive of the artifacts in the store; "" if the artifacts were copied to a
    folder.
    """

    paths: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class SubmissionTaken(RunEvent):
    """The agent's work has ended with `body` and `failure`, and the artifacts were copied. Only the grading has yet to
    be done. `sha256`: hash of the archive of the artifacts; "" if they were refused; `refusal` is then the reason.
    """

    body: dict[str, JsonValue] | None
    failure: Failure | None
    sha256: str = ""
    files: int = 0
    bytes: int = 0
    refusal: str = ""
    missing: tuple[str, ...] = ()
    """Why declared artifacts were not copied."""


@dataclass(frozen=True, kw_only=True)
class RunResumed(RunEvent):
    """Another process continues the run. The earlier events of the run from `step` on are void; new events follow."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RunRetried(RunEvent):
    """The run is queued again after a failure. `attempt`: the number of the next attempt, at least 2."""

    failure: Failure


@dataclass(frozen=True, kw_only=True)
class RunEnded(RunEvent):
    """The end of a durable run. Each durable run has exactly one event of this class. `state`: succeeded, failed or
    cancelled. `answer`: the model's last text; `is_cut`: `answer` contains only the beginning. `cost` None: no prices
    are known. `clocks`, `call_usage`: sums over its calls. `sandbox_s`: seconds in which the run had a session of its
    own. `seconds`: seconds since the run was claimed. `artifacts_file`: the id of the archive of its artifacts in the
    store. `task`: the id of the batch line, for an item with a grader. `grade` None: the run has no reward.
    """

    state: str
    failure: Failure | None = None
    answer: str = ""
    is_cut: bool = False
    stop_reason: str | None = None
    steps: int = 0
    calls: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    cost: float | None = None
    clocks: Clocks = field(default_factory=Clocks)
    call_usage: CallUsage = field(default_factory=CallUsage)
    sandbox_s: float = 0.0
    seconds: float = 0.0
    artifacts_file: str | None = None
    task: str = ""
    grade: Grade | None = None

    def to_json(self) -> dict[str, Any]:
        data = super().to_json()
        if not self.task:
            del data["task"], data["grade"]
        return data


# --- Events about the stream itself ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OutputOmitted(RunEvent):
    """No more output of the running call is published. The result contains the whole output."""

    call_id: str


@dataclass(frozen=True, kw_only=True)
class EventsOmitted(RunEvent):
    """`count` pieces of text or output were not published, because Redis did not answer."""

    count: int


@dataclass(frozen=True, kw_only=True)
class EventsMissed(RunEvent):
    """Older events of the run are no longer stored."""


@dataclass(frozen=True, kw_only=True)
class BatchNotice(RunEvent):
    """A message about a whole batch, such as: submitted, resumed, cancelling, an endpoint that does not answer. `run`
    is "". `is_warning`: the message is also in the summary of the batch.
    """

    run: str = ""
    message: str
    total: int | None = None
    is_warning: bool = False


OnEvent = Callable[[RunEvent], None]


def pass_to(*listeners: OnEvent) -> OnEvent:
    """Return a listener that passes each event to these listeners, in this order."""

    def on_event(event: RunEvent) -> None:
        for listener in listeners:
            listener(event)

    return on_event


PROGRESS_EVENTS = (RunClaimed, RunReady, StepFinished, CallFinished, RunRetried, RunEnded, BatchNotice)
"""Classes of the events from which the progress and the report of a batch are computed."""
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
