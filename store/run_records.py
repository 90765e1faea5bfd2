"""The records of a run and of a batch: one hash in Redis each.

What decides who runs what (a run's item, a batch's defaults) and what a run came to (its outcome) is signed, each for its tenant and its id. Fields that
scripts change or compare (states, claims, counters, concurrency) are not signed: a forged one disturbs a run or has it begun again, never changes it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationError

from contract.calls import Record
from contract.errors import ConfigError, EnvelopeRefused, RecordRefused
from contract.signing import SigningKeys
from store.batch_items import BatchItem, FailureKind, Outcome, RunLimits


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


def seal_item(keys: SigningKeys, tenant: str, run: str, batch: str, item: BatchItem) -> str:
    """Return the signed item of that run of that batch."""
    return keys.seal(f"item {tenant} {run} {batch}", item.model_dump_json())


def open_item(keys: SigningKeys, tenant: str, run: str, batch: str, sealed: str | bytes) -> BatchItem:
    """Return the item. Raises ConfigError when it is not signed for that run and batch, or was written by another release."""
    with readable(f"run {run} of tenant {tenant}"):
        return BatchItem.model_validate_json(keys.unseal(f"item {tenant} {run} {batch}", sealed))


def seal_outcome(keys: SigningKeys, tenant: str, run: str, outcome: Outcome) -> str:
    """Return the signed outcome of that run."""
    return keys.seal(f"outcome {tenant} {run}", outcome.model_dump_json())


def open_outcome(keys: SigningKeys, tenant: str, run: str, sealed: str | bytes) -> Outcome:
    """Return the outcome. Raises ConfigError as `open_item` does."""
    with readable(f"run {run} of tenant {tenant}"):
        return Outcome.model_validate_json(keys.unseal(f"outcome {tenant} {run}", sealed))


def seal_defaults(keys: SigningKeys, tenant: str, batch: str, defaults: BatchDefaults) -> str:
    """Return the signed defaults of that batch."""
    return keys.seal(f"defaults {tenant} {batch}", defaults.model_dump_json())


def seal_rows(keys: SigningKeys, tenant: str, batch: str, place: RowPlace) -> str:
    """Return the signed place of a batch's rows: a later command writes files there."""
    return keys.seal(f"rows {tenant} {batch}", place.model_dump_json())


def parse_run(keys: SigningKeys, tenant: str, run: str, fields: Mapping[bytes, bytes]) -> RunRecord:
    """Return the record of a run's hash. Raises ConfigError when its signed parts are not of this run, or another release wrote it."""
    values: dict[str, Any] = _decode(fields)
    values["item"] = open_item(keys, tenant, run, values.get("batch", ""), values.get("item", ""))
    outcome = values.pop("outcome", "")
    values["outcome"] = open_outcome(keys, tenant, run, outcome) if outcome else None
    values = {name: value for name, value in values.items() if name not in _OF_PROGRAMS}
    with readable(f"run {run} of tenant {tenant}"):
        return RunRecord.model_validate(values, strict=False)


def parse_batch(keys: SigningKeys, tenant: str, batch: str, fields: Mapping[bytes, bytes]) -> BatchRecord:
    """Return the record of a batch's hash. Raises ConfigError as `parse_run` does."""
    values: dict[str, Any] = _decode(fields)
    with readable(f"batch {batch} of tenant {tenant}"):
        values["defaults"] = BatchDefaults.model_validate_json(keys.unseal(f"defaults {tenant} {batch}", values.get("defaults", "")))
        rows = values.pop("rows", "")
        values["rows"] = RowPlace.model_validate_json(keys.unseal(f"rows {tenant} {batch}", rows)) if rows else None
        values["failed"] = {kind: int(values.pop(f"failed:{kind}", 0)) for kind in FailureKind}
        values = {name: value for name, value in values.items() if name in BatchRecord.model_fields}
        return BatchRecord.model_validate(values, strict=False)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise ConfigError, without text of the record, for a record that cannot be verified or read."""
    advice = "continue it with the release that wrote it, or submit it again"
    try:
        yield
    except EnvelopeRefused as error:
        raise RecordRefused(f"the record of {name} cannot be verified, so it is not used: {advice}. {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"the record of {name} cannot be read ({where}: {first['type']}): {advice}") from error
    except ValueError as error:
        raise ConfigError(f"the record of {name} cannot be read: {advice}") from error


def _decode(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
