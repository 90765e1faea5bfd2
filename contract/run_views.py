"""Runs and batches, as the HTTP API and `--json` return them."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.calls import CallUsage, Record
from toolcrew.contract.clock import Instant
from toolcrew.contract.run_events import Failure
from toolcrew.contract.run_spec import CommonLimits, ModelChoice
from toolcrew.contract.session_spec import SandboxOptions
from toolcrew.contract.webhooks import MAX_URL_CHARS, WebhookDelivery


class DurableRunState(StrEnum):
    """The state of a durable run. `waiting_for_approval`: the run is in progress, and one of its calls waits for a
    person's approval.
    """

    QUEUED = "queued"
    RUNNING = "running"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (DurableRunState.SUCCEEDED, DurableRunState.FAILED, DurableRunState.CANCELLED)


class ForkPoint(Record):
    """The point of a run at which another run was forked from it. `step`: number of steps that both runs share."""

    run: str
    step: int = Field(ge=0)


class RunView(BaseModel):
    """A run. `attempt`: 1, and one more after each failure of the infrastructure. `stop_reason`: why the run ended.
    `steps`: model replies. `clocks`: durations of its phases, in seconds. `cost` is null if the model has no prices.
    The fields from `answer` on are set at the end of the run.

    `usage`: tokens. `call_usage`: resources that its calls used in sandboxes. `sandbox_s`: seconds in which the run had
    its own session. `forked_from`: null if the run is no fork. For a fork, all sums exclude the shared steps; only
    `steps` includes them.

    `is_cut`: a list contains only the beginning of the answer. `artifacts`: the paths in the archive `artifacts_file`
    (GET /v1/files/{id}/content); lists omit them. `artifacts_missing`: why other files are missing. `webhook`: null if
    the run has none. Times are in ISO 8601.
    """

    id: str
    tenant: str
    state: DurableRunState
    instruction: str
    model: str | None
    session: str | None
    metadata: dict[str, str]
    priority: int
    attempt: int
    created_at: Instant
    started_at: Instant | None
    ended_at: Instant | None
    forked_from: ForkPoint | None
    webhook: WebhookDelivery | None = None
    answer: str | None = None
    is_cut: bool = False
    stop_reason: str | None = None
    steps: int | None = None
    usage: dict[str, int] | None = None
    cost: float | None = None
    clocks: dict[str, float] | None = None
    call_usage: CallUsage | None = None
    sandbox_s: float | None = None
    failure: Failure | None = None
    artifacts: tuple[str, ...] = ()
    artifacts_missing: tuple[str, ...] = ()
    artifacts_file: str | None = None


class RunForks(BaseModel):
    """The new runs of a fork."""

    runs: list[RunView]


class RequestCounts(Record):
    """Numbers of items: all, succeeded, failed, waiting and running."""

    total: int
    completed: int
    failed: int
    waiting: int = 0
    running: int = 0


class BatchStatus(Record):
    """A batch. `status`: in_progress, cancelling, cancelled or completed. `failed`: numbers of failures by kind.
    `concurrency`: items that run at the same time. Fields have the names of OpenAI's batches if they have the same
    meaning. Times are in ISO 8601.
    """

    id: str
    status: str
    name: str | None
    request_counts: RequestCounts
    failed: dict[str, int]
    concurrency: int
    created_at: Instant
    ended_at: Instant | None
    webhook: WebhookDelivery | None = None


class SubmittedBatch(BatchStatus):
    """A batch that was just submitted, with the fields of BatchStatus. `warnings`: problems in the lines that do not
    prevent the batch.
    """

    warnings: list[str]


class BatchOptions(ModelChoice, SandboxOptions, CommonLimits):
    """Options that apply to all lines. The model, the sizes, `user` and the limits apply only to lines that do not set
    them.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """The id of the batch. Submit the same lines with the same id to continue the batch."""
    name: str = Field(default="", max_length=200)
    """The name that lists of batches show."""
    concurrency: int | None = Field(default=None, ge=1, le=10_000)
    """Items that run at the same time, in all orchestrators. Default: the previous value, or 16 for a new batch."""
    retries: int = Field(default=2, ge=0, le=20)
    """New attempts of an item after infrastructure failures."""
    webhook_url: str | None = Field(default=None, max_length=MAX_URL_CHARS)
    """The URL that is notified at the end of the batch. The header `Webhook-Secret` has the secret of the signature."""
    ask: bool = False
    """Let calls that need approval wait for a decision. Default: TOOLCREW_APPROVALS of the orchestrator that runs the
    item.
    """
