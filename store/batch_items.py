"""What one line of a batch asks for: an agent run or a single tool call; and how it can fail."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, JsonValue

from contract.calls import Record

MAX_ID_CHARS = 256
MAX_ITEMS = 50_000
MAX_INPUT_BYTES = 200 * 1024 * 1024
RUNS_URL, CALLS_URL, CHAT_URL = "/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"


class FailureKind(StrEnum):
    """Whose fault an item's failure is; only `infrastructure` is worth the same attempt again."""

    MODEL = "model"
    """It gave no answer: cut, empty or malformed replies, a limit of the run, a request that it refuses."""
    TOOL = "tool"
    """The one call that the item is failed: bad arguments, a timeout, a refusal."""
    INFRASTRUCTURE = "infrastructure"
    """No sandbox, no host, no Redis, no model endpoint, a process that died."""
    INPUT = "input"
    """What the line names cannot be had: its workspace, a checkpoint, a tool, an image, the tenant's leave."""
    CANCELLED = "cancelled"


class RunLimits(Record):
    """Of an item's run; None: as the batch says, else the defaults of ReActOptions."""

    max_iterations: int | None = Field(default=None, ge=1)
    tool_timeout_s: float | None = Field(default=None, gt=0)
    max_wall_s: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: float | None = Field(default=None, gt=0)


class Ground(Record):
    """Where an item works. `workspace`: a folder, an archive or a git bundle, read by whoever works the item; `restore`: a checkpoint instead.

    `artifacts`: patterns below /workspace of what is to be copied out at the end. `session`: an open one of the tenant's, instead of one of the item's
    own; it stays open. Left out of the bytes where there is none: releases before it can read those.
    """

    workspace: str | None = None
    restore: str | None = None
    image: str | None = None
    network: Literal["none", "egress"] | None = None
    artifacts: tuple[str, ...] = ()
    session: str | None = Field(default=None, exclude_if=lambda session: session is None)


class RunBody(Record):
    """An agent run. `history`: messages before the instruction, in the OpenAI wire shape. `tools` None: all that the model can cope with."""

    instruction: str = Field(min_length=1)
    history: tuple[dict[str, JsonValue], ...] = ()
    model: str | None = None
    dialect: Literal["native", "tags", "json", "auto"] | None = None
    tools: tuple[str, ...] | None = None
    limits: RunLimits = RunLimits()
    sampling: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields that each request to the model carries as they are (`ModelRequest.extra`)."""


class CallBody(Record):
    """One tool call, in a session of its own."""

    name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0)


class BatchItem(Record):
    """One line. `line`: its number in the file, from 1. `url`: the shape that its row's body has. `priority`: higher ones begin first."""

    custom_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    line: int = Field(ge=1)
    url: Literal["/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"]
    work: RunBody | CallBody
    ground: Ground = Ground()
    priority: int = Field(default=0, ge=-100, le=100)


class Failure(Record):
    """Why an item has no result. `code`: an ErrorCode, a StopReason or one of runs/outcomes.py."""

    kind: FailureKind
    code: str
    message: str


class Outcome(Record):
    """How an item ended: exactly one a run. `run`: its id; `body`: what the row's response holds, None with a failure that left nothing to tell.

    A failed run keeps its body, too, where it has one: the last text, the steps, the usage.
    """

    custom_id: str
    run: str
    status_code: int = Field(ge=100, le=599)
    body: dict[str, JsonValue] | None = None
    failure: Failure | None = None
    attempt: int = Field(default=1, ge=1)
