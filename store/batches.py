"""Records of batches: items and outcomes, and the state of a batch.

Items, outcomes, defaults and locations of row files are signed for their run or batch, because they decide what runs
and which files are written.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from toolcrew.contract.calls import CallUsage, Record
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.names import tenant_key
from toolcrew.contract.run_events import PROGRESS_EVENTS, Failure, FailureKind, Grade, RunEnded, RunEvent, parse_event
from toolcrew.contract.run_spec import ItemEnvironment, ModelChoice, RunBody, RunLimits
from toolcrew.contract.run_views import ForkPoint
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, SandboxOptions
from toolcrew.contract.signing import SigningKeys, readable
from toolcrew.contract.webhooks import WebhookDelivery
from toolcrew.store.webhooks import parse_delivery

RUN_TTL_S = 30 * 24 * 3600
"""Lifetime of a run and of its batch after the last change, in seconds."""
NO_BATCH = ""
"""Field `batch` of a durable run: it was started without a batch."""
RECORD_ADVICE = "continue it with the release that wrote it, or submit it again"
"""Advice on a run or a batch whose record this release cannot read."""


def batch_key(deployment: str, tenant: str, batch: str) -> str:
    """Return the key of the hash of a batch (BatchRecord). Keys with a suffix hold the ids of its runs: `:waiting`
    (sorted set), `:delayed` and `:running` (sets), `:ended` (sorted set) and `:items` (list). The key with `:events` is
    the stream of its events.
    """
    return tenant_key(deployment, tenant, f"batch.{batch}")


def runs_key(deployment: str, tenant: str) -> str:
    """Return the beginning of the keys of a tenant's durable runs. Keys with a suffix hold their ids: `:waiting`,
    `:delayed` and `:running` as for a batch, `:index` (sorted set of all runs, by their start), and the sorted sets
    `:succeeded`, `:failed` and `:cancelled` with parts of `:index`. The key with `:sessions` is the hash of the
    sessions that durable runs use.
    """
    return tenant_key(deployment, tenant, "runs")


def batches_key(deployment: str, tenant: str) -> str:
    """Return the key of the sorted set of a tenant's batches, by submission time. The set may contain expired
    batches.
    """
    return tenant_key(deployment, tenant, "batch-ids")


def member(tenant: str, name: str) -> str:
    """Return `<tenant>|<id>`, the name of a run or batch in Redis sets that all tenants share. It is unambiguous,
    because the name of a tenant contains no `|`.
    """
    return f"{tenant}|{name}"


def split_member(text: str) -> tuple[str, str]:
    tenant, _, name = text.partition("|")
    return tenant, name


MAX_ID_CHARS = 256
MAX_ITEMS = 50_000
MAX_INPUT_BYTES = 200 * 1024 * 1024
RUNS_URL, CALLS_URL, CHAT_URL = "/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"

ARTIFACTS_FOLDER = "/output/artifacts"
"""The folder of the artifacts in a grader's sandbox."""


class Grader(Record):
    """Grading of an item. `command`: a bash command, which runs in /workspace of a new sandbox of `image`. `files`: the
    files that /workspace starts with, named like the workspace of an item. `artifacts`: patterns of files of the item's
    workspace; empty: the files that differ from its start. `reward_file`: absolute path of the file with the reward;
    None: the exit status of the command gives the reward.
    """

    command: str = Field(min_length=1)
    files: str | None = None
    image: str | None = None
    artifacts: tuple[str, ...] = ()
    reward_file: str | None = None
    timeout_s: float = Field(gt=0)
    options: SandboxOptions = DEFAULT_OPTIONS


class CallBody(Record):
    """A batch item that is one tool call, in its own session."""

    name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0)


class ForkSource(ForkPoint):
    """The log entries that a fork copies from the original run. `attempt`: the attempt of the original run. `entries`:
    how many entries of its log are copied.
    """

    attempt: int = Field(ge=1)
    entries: int = Field(ge=0)


class BatchItem(Record):
    """A line of a batch, or one sample of it. `line`: its number in the file, from 1. `url`: the format of the body in
    its row. `priority`: items with a higher priority start first. `task`: the id of the line, for a line with a grader.
    `forked_from`: for a forked run, the steps that it shares with the run it was forked from; `environment.fork` then
    names the session that keeps the state after these steps.
    """

    custom_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    line: int = Field(ge=1)
    url: Literal["/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"]
    work: RunBody | CallBody
    environment: ItemEnvironment = ItemEnvironment()
    priority: int = Field(default=0, ge=-100, le=100)
    grader: Grader | None = Field(default=None, exclude_if=lambda grader: grader is None)
    task: str = Field(default="", exclude_if=lambda task: not task)
    forked_from: ForkSource | None = Field(default=None, exclude_if=lambda source: source is None)

    @property
    def sources(self) -> list[str]:
        """Return the paths and the files of the store that the item's sandboxes start with."""
        paths = [self.environment.workspace, self.grader.files if self.grader is not None else None]
        return [path for path in paths if path is not None]


class ItemOutcome(Record):
    """The end of an item; each run has exactly one outcome. `run`: the id of the run. `body`: the response in the row;
    None for a failure without a response. `task`: the field `task` of its BatchItem. `output`: the end of the grader's
    output.

    A failed run keeps its body if there is one: the last text, the steps and the usage.
    """

    custom_id: str
    run: str
    status_code: int = Field(ge=100, le=599)
    body: dict[str, JsonValue] | None = None
    failure: Failure | None = None
    attempt: int = Field(default=1, ge=1)
    task: str = Field(default="", exclude_if=lambda task: not task)
    grade: Grade | None = Field(default=None, exclude_if=lambda grade: grade is None)
    output: str = Field(default="", exclude_if=lambda output: not output)


class BatchState(StrEnum):
    """The state of a batch. `cancelling`: the running items are being ended."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"


class BatchDefaults(ModelChoice):
    """Values for the lines of a batch that do not set them. `retries`: how often an item is restarted after an
    infrastructure failure.
    """

    limits: RunLimits = RunLimits()
    prompt_price: float | None = Field(default=None, ge=0)
    completion_price: float | None = Field(default=None, ge=0)
    retries: int = Field(default=2, ge=0, le=20)
    options: SandboxOptions = Field(default=DEFAULT_OPTIONS, exclude_if=lambda options: options == DEFAULT_OPTIONS)
    artifacts: str | None = None
    """The folder for the items' artifacts, on the machine of the orchestrator. None: the artifacts go to the store."""
    asks_people: bool = Field(default=False, exclude_if=lambda asks: not asks)
    """True if approval requests go to the queue of questions (docs/approvals.md). False is not serialized, so that
    earlier releases can read the record.
    """


RUN_DEFAULTS = BatchDefaults(asks_people=True)
"""Defaults of a durable run. Such a run has no terminal, so approval requests go to the queue of questions."""


class RowLocation(Record):
    """The paths of the row files to which a batch was last written. `host`: the name of the machine with these
    paths.
    """

    host: str
    output: str
    errors: str


class BatchRecord(Record):
    """The record of a batch. `sha256`: hash of the input file. `concurrency`: how many items run at the same time,
    over all orchestrators. `failed`: number of failed runs by kind of failure. `is_detached`: services (`toolcrew serve
    api`, `toolcrew serve batches`) run the batch; otherwise only a command that was started for this batch runs it.
    """

    state: BatchState
    total: int
    sha256: str
    concurrency: int
    defaults: BatchDefaults
    created_at: float
    ended_at: float = 0.0
    name: str = ""
    is_detached: bool = False
    rows: RowLocation | None = None
    succeeded: int = 0
    failed: dict[FailureKind, int] = Field(default_factory=dict)
    webhook: WebhookDelivery | None = Field(default=None, exclude_if=lambda webhook: webhook is None)


def seal_item(keys: SigningKeys, tenant: str, run: str, batch: str, item: BatchItem) -> str:
    """Return the signed item of a run in a batch."""
    return keys.seal(f"item {tenant} {run} {batch}", item.model_dump_json())


def open_item(keys: SigningKeys, tenant: str, run: str, batch: str, sealed: str | bytes) -> BatchItem:
    """Return the item. Raises ConfigError: the item is not signed for that run and batch, or another release
    wrote it.
    """
    with readable(f"the record of run {run} of tenant {tenant}", RECORD_ADVICE):
        return BatchItem.model_validate_json(keys.unseal(f"item {tenant} {run} {batch}", sealed))


def seal_outcome(keys: SigningKeys, tenant: str, run: str, outcome: ItemOutcome) -> str:
    """Return the signed outcome of a run."""
    return keys.seal(f"outcome {tenant} {run}", outcome.model_dump_json())


def open_outcome(keys: SigningKeys, tenant: str, run: str, sealed: str | bytes) -> ItemOutcome:
    """Return the outcome. Raises the same errors as `open_item`."""
    with readable(f"the record of run {run} of tenant {tenant}", RECORD_ADVICE):
        return ItemOutcome.model_validate_json(keys.unseal(f"outcome {tenant} {run}", sealed))


def seal_defaults(keys: SigningKeys, tenant: str, batch: str, defaults: BatchDefaults) -> str:
    """Return the signed defaults of a batch."""
    return keys.seal(f"defaults {tenant} {batch}", defaults.model_dump_json())


def seal_rows(keys: SigningKeys, tenant: str, batch: str, position: RowLocation) -> str:
    """Return the signed location of a batch's rows. The signature matters, because a later command writes files
    there.
    """
    return keys.seal(f"rows {tenant} {batch}", position.model_dump_json())


def parse_batch(keys: SigningKeys, tenant: str, batch: str, fields: Mapping[bytes, bytes]) -> BatchRecord:
    """Return the record in a batch's hash. Raises the same errors as `parse_run`."""
    values: dict[str, Any] = decode_fields(fields)
    with readable(f"the record of batch {batch} of tenant {tenant}", RECORD_ADVICE):
        values["defaults"] = BatchDefaults.model_validate_json(
            keys.unseal(f"defaults {tenant} {batch}", values.get("defaults", ""))
        )
        rows = values.pop("rows", "")
        values["rows"] = RowLocation.model_validate_json(keys.unseal(f"rows {tenant} {batch}", rows)) if rows else None
        values["webhook"] = parse_delivery(values)
        values["failed"] = {kind: int(values.pop(f"failed:{kind}", 0)) for kind in FailureKind}
        values = {name: value for name, value in values.items() if name in BatchRecord.model_fields}
        return BatchRecord.model_validate(values, strict=False)


def decode_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}


def final_state(failure: Failure | None) -> str:
    """Return the state of a run that has ended: succeeded, failed or cancelled."""
    if failure is None:
        return "succeeded"
    return "cancelled" if failure.kind is FailureKind.CANCELLED else "failed"


def build_ended(outcome: ItemOutcome, at: float) -> RunEnded:
    """Return the RunEnded event for an outcome that was read from a row. The event has no times."""
    body: Mapping[str, Any] = outcome.body or {}
    usage, steps = body.get("usage"), body.get("steps")
    counts = usage if isinstance(usage, dict) else {}
    # A chat completion has its cost in its usage.
    cost = body.get("cost", counts.get("cost"))
    try:
        # A single call has its usage in the field `usage`.
        call_usage = CallUsage.model_validate(body.get("call_usage") or counts)
    except ValidationError:
        call_usage = CallUsage()  # the usage of a chat completion, which has tokens
    return RunEnded(
        run=outcome.run,
        at=at,
        attempt=outcome.attempt,
        item=outcome.custom_id,
        state=final_state(outcome.failure),
        failure=outcome.failure,
        steps=_count(steps),
        usage=TokenUsage(
            *(_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens", "cached_tokens"))
        ),
        cost=float(cost) if isinstance(cost, int | float) else None,
        task=outcome.task,
        grade=outcome.grade,
        call_usage=call_usage,
        sandbox_s=float(body.get("sandbox_s") or 0.0),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def parse_batch_event(text: str | bytes) -> RunEvent:
    """Return one of PROGRESS_EVENTS. Raises ValueError: the text is another event or invalid."""
    event = parse_event(json.loads(text))
    if not isinstance(event, PROGRESS_EVENTS):
        raise ValueError("the record is not an event of a batch")
    return event
