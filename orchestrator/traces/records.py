"""The lines of a trace, version 1: a closed set of records, one event each (docs/traces.md)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from contract.calls import Clocks, KillReport, SandboxInfo, Spill

VERSION = 1
Payload = dict[str, Any]
"""Plain JSON that is a model's or a tool's own."""


class TraceLine(BaseModel):
    """What every line has. `ts`: ISO 8601, UTC; `seq`: place in the file, over all attempts; `parent`: the span it
    happened in, None for the run's own.

    Fields that a later release adds are passed over.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    v: Literal[1] = 1
    ts: str
    seq: int = Field(ge=0)
    trace_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    span_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    parent: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    tenant: str
    session: str | None = None
    run: str


class RunStart(TraceLine):
    """Each attempt of a run begins with one; `is_continued`: the file had lines of an earlier one."""

    type: Literal["run.start"] = "run.start"
    instruction: str
    model: str
    dialect: str
    release: str = ""
    is_continued: bool = False


class LlmRequest(TraceLine):
    """Its messages are the first `kept` of the request before it in this attempt, and `messages` behind them: `total`
    in all.

    `tools`: SHA-256 of the canonical JSON of the tool definitions, None without any; `tool_definitions`: themselves,
    where that hash comes up first.
    """

    type: Literal["llm.request"] = "llm.request"
    step: int
    kept: int = Field(ge=0)
    messages: list[Payload]
    total: int = Field(ge=0)
    tools: str | None = None
    tool_definitions: list[Payload] | None = None
    extra: Payload = {}


class LlmDelta(TraceLine):
    """A piece of the reply came: how much, not what. A secret in two pieces could not be masked, and the response has
    the whole.
    """

    type: Literal["llm.delta"] = "llm.delta"
    step: int
    chars: int


class LlmResponse(TraceLine):
    """The reply. `model_s`: without the calls that ran while it came."""

    type: Literal["llm.response"] = "llm.response"
    step: int
    message: Payload
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model_s: float = 0.0


class ToolCalled(TraceLine):
    """The model has asked for it, and its turn has come."""

    type: Literal["tool.call"] = "tool.call"
    step: int
    call_id: str
    tool: str
    arguments: Payload


class ApprovalRequested(TraceLine):
    type: Literal["approval.request"] = "approval.request"
    call_id: str
    tool: str
    digest: str
    reason: str
    warning: str = ""
    expires_at: float | None = None


class ApprovalDecision(TraceLine):
    type: Literal["approval.decision"] = "approval.decision"
    call_id: str
    digest: str
    is_allowed: bool
    reason: str = ""
    is_changed: bool = False


class ToolStart(TraceLine):
    """It goes to the pool. `arguments`: as they are run, where these are not those of the `tool.call`."""

    type: Literal["tool.start"] = "tool.start"
    call_id: str
    tool: str
    arguments: Payload | None = None


class ToolOutput(TraceLine):
    """A piece of output came while it ran: how much, not what, for the reason of `llm.delta`."""

    type: Literal["tool.output"] = "tool.output"
    call_id: str
    stream: str
    chars: int


class ToolResulted(TraceLine):
    """`seconds`: since its `tool.call`; None: it could not be run, as its request was malformed."""

    type: Literal["tool.result"] = "tool.result"
    step: int
    call_id: str
    tool: str
    success: bool
    output: str | None = None
    error: str | None = None
    error_code: str | None = None
    metadata: Payload = {}
    truncated: bool = False
    spill: Spill | None = None
    clocks: Clocks = Clocks()
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    seconds: float | None = None

    def text(self) -> str:
        """What a model reads of it, as `ToolResult.text`."""
        if self.success:
            return self.output or ""
        head = f"Error [{self.error_code}]: {self.error}"
        return f"{head}\n{self.output}" if self.output else head


class SandboxStart(TraceLine):
    """A sandbox serves the run from here. `why`: opened, or replaced (another one of the session took over)."""

    type: Literal["sandbox.start"] = "sandbox.start"
    sandbox: str = ""
    generation: int = 1
    host: str = ""
    image: str = ""
    network: str = ""
    start_s: float = 0.0
    why: Literal["opened", "replaced"] = "opened"


class SandboxStop(TraceLine):
    """`why`: closed with the run's session, or replaced."""

    type: Literal["sandbox.stop"] = "sandbox.stop"
    sandbox: str = ""
    why: Literal["closed", "replaced"] = "closed"


class RunWarning(TraceLine):
    type: Literal["warning"] = "warning"
    message: str


class RunEnd(TraceLine):
    """`stop_reason` None: it was aborted, for the reason `error`. `lost_lines`, `lost_blobs`: what could not be written
    until here.
    """

    type: Literal["run.end"] = "run.end"
    stop_reason: str | None = None
    error: str | None = None
    answer: str = ""
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    clocks: Clocks = Clocks()
    lost_lines: int = 0
    lost_blobs: int = 0


TraceRecord = Annotated[
    RunStart
    | LlmRequest
    | LlmDelta
    | LlmResponse
    | ToolCalled
    | ApprovalRequested
    | ApprovalDecision
    | ToolStart
    | ToolOutput
    | ToolResulted
    | SandboxStart
    | SandboxStop
    | RunWarning
    | RunEnd,
    Field(discriminator="type"),
]
TYPES = frozenset(
    {
        "run.start", "llm.request", "llm.delta", "llm.response", "tool.call", "approval.request", "approval.decision",
        "tool.start", "tool.output", "tool.result", "sandbox.start", "sandbox.stop", "warning", "run.end",
    }
)  # fmt: skip
IDENTIFIERS = frozenset(
    {
        "v",
        "ts",
        "seq",
        "trace_id",
        "span_id",
        "parent",
        "tenant",
        "session",
        "run",
        "type",
        "call_id",
        "digest",
        "tools",
        "error_code",
    }
)
"""Fields that are ours, and so neither masked nor kept apart."""

_ANY: TypeAdapter[TraceRecord] = TypeAdapter(TraceRecord)


def parse_record(line: Mapping[str, Any]) -> TraceRecord:
    """One line. Raises ValidationError for what is none of version 1."""
    return _ANY.validate_python(line)


def is_later(line: Mapping[str, Any]) -> bool:
    """Whether it is of a later version, so that a reader of this one passes it over."""
    version, kind = line.get("v"), line.get("type")
    return isinstance(version, int) and (
        version > VERSION or (version == VERSION and isinstance(kind, str) and kind not in TYPES)
    )
