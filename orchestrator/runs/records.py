"""What is known of a run and of a batch: one hash in Redis each."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from contract.calls import Record
from orchestrator.batches.items import BatchItem, FailureKind, Outcome, RunLimits


class RunState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class BatchState(StrEnum):
    """`cancelling`: what runs is being ended."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"


class RunRecord(Record):
    """`claim`: the word of whoever holds the run; `attempt`: 1, and more when it was begun anew after a failure; `first_attempt`: the one since which it
    was begun anew by itself only; `losses`: how often its holder died since its log last grew. Instants in Unix seconds of Redis's clock."""

    batch: str
    item: BatchItem
    state: RunState
    claim: str = ""
    owner: str = ""
    attempt: int = Field(default=1, ge=1)
    first_attempt: int = Field(default=1, ge=1)
    losses: int = 0
    priority: int = 0
    line: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    failure: str = ""
    outcome: Outcome | None = None


class BatchDefaults(Record):
    """What the lines of a batch do not say. `retries`: how often an item is begun anew after an infrastructure failure."""

    model: str | None = None
    dialect: str | None = None
    limits: RunLimits = RunLimits()
    prompt_price: float | None = Field(default=None, ge=0)
    completion_price: float | None = Field(default=None, ge=0)
    retries: int = Field(default=2, ge=0, le=20)
    artifacts: str | None = None
    """The folder that items' artifacts are copied to, as whoever works them sees it."""
    asks_people: bool = Field(default=False, exclude_if=lambda asks: not asks)
    """What must be approved waits in the queue of questions (docs/approvals.md). Left out of the bytes where it is not so: releases before it can read
    those."""


class RowPlace(Record):
    """Where the rows of a batch were written to last. `host`: the machine of these paths, by its name."""

    host: str
    output: str
    errors: str


class BatchRecord(Record):
    """`sha256`: of the input file; `concurrency`: items at a time, over all orchestrators. `failed`: by kind. `is_detached`: handed over to the
    orchestrators that serve everybody; else it is worked by who names it."""

    state: BatchState
    total: int
    sha256: str
    concurrency: int
    defaults: BatchDefaults
    created_at: float
    ended_at: float = 0.0
    name: str = ""
    is_detached: bool = False
    rows: RowPlace | None = None
    succeeded: int = 0
    failed: dict[FailureKind, int] = Field(default_factory=dict)


_OF_PROGRAMS = frozenset(
    [
        "digest",
        "about",
        "session",
        "created_at",
        "is_cancelled",
        "told",
        "told_step",
        "asking",
        "event_bytes",
        "trimmed",
        "last_event",
        "end",
    ]
)
"""Fields that a program's run has beside the record's own (hosted_records.py, told_events.py)."""


def parse_run(fields: Mapping[bytes, bytes]) -> RunRecord:
    """The record of a run's hash. Raises ValidationError for what is none."""
    told: dict[str, Any] = {name.decode(): value.decode() for name, value in fields.items()}
    told["item"] = BatchItem.model_validate_json(told.get("item", "{}"))
    outcome = told.pop("outcome", "")
    told["outcome"] = Outcome.model_validate_json(outcome) if outcome else None
    told = {name: value for name, value in told.items() if name not in _OF_PROGRAMS}
    return RunRecord.model_validate(told, strict=False)


def parse_batch(fields: Mapping[bytes, bytes]) -> BatchRecord:
    """The record of a batch's hash. Raises ValidationError for what is none."""
    told: dict[str, Any] = {name.decode(): value.decode() for name, value in fields.items()}
    told["defaults"] = BatchDefaults.model_validate_json(told.get("defaults", "{}"))
    rows = told.pop("rows", "")
    told["rows"] = RowPlace.model_validate_json(rows) if rows else None
    told["failed"] = {kind: int(told.pop(f"failed:{kind}", 0)) for kind in FailureKind}
    told = {name: value for name, value in told.items() if name in BatchRecord.model_fields}
    return BatchRecord.model_validate(told, strict=False)
