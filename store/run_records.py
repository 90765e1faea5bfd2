"""Records of runs: the fields of a run's hash, the fields of a durable run that lists show, and the end of a durable
run.
"""

import json
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from toolcrew.contract.calls import CallUsage, Clocks, Record
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.run_events import Failure, FailureKind, RunEnded
from toolcrew.contract.run_views import DurableRunState, ForkPoint
from toolcrew.contract.signing import SigningKeys, readable
from toolcrew.contract.webhooks import WebhookDelivery
from toolcrew.store.batches import (
    NO_BATCH,
    RECORD_ADVICE,
    BatchItem,
    ItemOutcome,
    decode_fields,
    final_state,
    open_item,
    open_outcome,
)
from toolcrew.store.run_log import pack_transcript
from toolcrew.store.webhooks import DELIVERY_FIELDS, parse_delivery

SHOWN_ANSWER = 2000


class RunState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class RunRecord(Record):
    """The record of a run. Times are Unix seconds of Redis's clock. `claim`: the token of the process that executes the
    run. `attempt`: 1, or higher after a restart. `first_attempt`: the first attempt of the current series of automatic
    restarts. `losses`: how often a process that executed the run has died since the log of the run last grew.
    `denials`: how often since then a model server denied the process that executed the run.
    """

    batch: str
    item: BatchItem
    state: RunState
    claim: str = ""
    owner: str = ""
    attempt: int = Field(default=1, ge=1)
    first_attempt: int = Field(default=1, ge=1)
    losses: int = 0
    denials: int = 0
    priority: int = 0
    line: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    failure: str = ""
    outcome: ItemOutcome | None = None


_DURABLE_FIELDS = frozenset((
    "digest", "about", "session", "created_at", "is_cancelled", "event_count", "published_step", "asking",
    "event_bytes", "trimmed", "last_event", "end", "webhook", "webhook_tries", "webhook_notice", "webhook_state",
    "webhook_error", "has_states",
    "run_bytes", "log_bytes", "artifact_bytes", "stream_bytes",
))  # fmt: skip
"""Additional fields in the hash of a durable run."""


class RunEnd(Record):
    """The end of a run. `failure` None: the run succeeded. `answer`: the last text of the model, even if a limit
    stopped the run. `is_cut`: `answer` contains only the beginning, as in lists and events. `cost` None: no prices are
    known. `clocks`, `call_usage`: sums over all calls. `sandbox_s`: time in which the run had a session of its own.
    `artifacts`: the paths in the archive `artifacts_file`; empty in lists and events."""

    answer: str = ""
    is_cut: bool = False
    stop_reason: str | None = None
    steps: int = 0
    usage: TokenUsage = TokenUsage()
    cost: float | None = None
    clocks: Clocks = Clocks()
    call_usage: CallUsage = CallUsage()
    sandbox_s: float = 0.0
    failure: Failure | None = None
    artifacts: tuple[str, ...] = ()
    artifacts_missing: tuple[str, ...] = ()
    artifacts_file: str | None = None


class DurableRun(Record):
    """A durable run. `instruction`: the beginning of its instruction. `attempt`: above 1 if an infrastructure failure
    made a restart necessary. `forked_from` None: the run is no fork. `end`: set exactly if the state is final.
    `webhook` None: the run has no webhook. Times are Unix seconds of Redis's clock.
    """

    id: str
    tenant: str
    state: DurableRunState
    instruction: str
    model: str | None = None
    session: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    priority: int = 0
    attempt: int = 1
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    forked_from: ForkPoint | None = None
    end: RunEnd | None = None
    webhook: WebhookDelivery | None = None


class RunPage(Record):
    """A page of durable runs, the newest first. `next_cursor` None: this is the last page."""

    runs: tuple[DurableRun, ...]
    next_cursor: str | None = None


class About(Record):
    """The fields of a durable run's request that lists of runs show."""

    instruction: str
    model: str | None = None
    session: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    forked_from: ForkPoint | None = Field(default=None, exclude_if=lambda point: point is None)


LISTED = (
    "state", "about", "priority", "attempt", "created_at", "started_at", "ended_at", "failure", "asking", "end",
    "batch", *DELIVERY_FIELDS,
)  # fmt: skip
"""The fields of a run's hash that lists of runs need."""


def parse_run(keys: SigningKeys, tenant: str, run: str, fields: Mapping[bytes, bytes]) -> RunRecord:
    """Return the record in a run's hash. Raises ConfigError: a signed part belongs to another run, or another release
    wrote it.
    """
    values: dict[str, Any] = decode_fields(fields)
    values["item"] = open_item(keys, tenant, run, values.get("batch", ""), values.get("item", ""))
    outcome = values.pop("outcome", "")
    values["outcome"] = open_outcome(keys, tenant, run, outcome) if outcome else None
    values = {name: value for name, value in values.items() if name not in _DURABLE_FIELDS}
    with readable(f"the record of run {run} of tenant {tenant}", RECORD_ADVICE):
        return RunRecord.model_validate(values, strict=False)


def parse_durable_run(tenant: str, run: str, fields: Mapping[str, bytes | None]) -> DurableRun | None:
    """Return the durable run that these fields of a hash describe; None if the run was removed or is an item of a
    batch. Raises ConfigError: another release wrote the fields.
    """
    values = {name: value.decode() for name, value in fields.items() if value is not None}
    if values.get("batch") != NO_BATCH or "about" not in values:
        return None
    with readable(f"the record of run {run} of tenant {tenant}", RECORD_ADVICE):
        return DurableRun(
            id=run,
            tenant=tenant,
            state=_state(values),
            **dict(About.model_validate_json(values["about"])),
            priority=int(values.get("priority", 0)),
            attempt=int(values.get("attempt", 1)),
            created_at=float(values["created_at"]),
            started_at=float(values.get("started_at") or 0) or None,
            ended_at=float(values.get("ended_at") or 0) or None,
            end=parse_end(values["end"]) if values.get("end") else None,
            webhook=parse_delivery(values),
        )


def build_end(outcome: ItemOutcome) -> RunEnd:
    """Return the end that an outcome describes, with the whole answer."""
    body: Mapping[str, Any] = outcome.body or {}
    values = {name: body[name] for name in RunEnd.model_fields if name in body}
    return RunEnd.model_validate({**values, "failure": outcome.failure}, strict=False)


def end_event(run: str, at: float, attempt: int, end: RunEnd, calls: int = 0, seconds: float = 0.0) -> str:
    """Return the last event of a run as JSON. The hash of the run stores the same text. A long answer is shortened."""
    fields: dict[str, Any] = {name: value for name, value in end if name not in ("artifacts", "artifacts_missing")}
    fields["is_cut"] = end.is_cut or len(end.answer) > SHOWN_ANSWER
    fields["answer"] = end.answer[:SHOWN_ANSWER]
    event = RunEnded(
        run=run, at=at, attempt=attempt, state=final_state(end.failure), calls=calls, seconds=seconds, **fields
    )
    return json.dumps(event.to_json(), separators=(",", ":"))


def pack_end(outcome: ItemOutcome, calls: int, seconds: float) -> tuple[ItemOutcome, str, bytes]:
    """Return the outcome for the record, the last event, and the packed transcript, which is stored separately. The
    transcript is b"" if there is none or if it is too large.
    """
    body = dict(outcome.body or {})
    transcript = body.pop("transcript", None)
    stored = outcome.model_copy(update={"body": body}) if outcome.body is not None else outcome
    packed = pack_transcript(transcript) if transcript is not None else b""
    event = end_event(outcome.run, time.time(), outcome.attempt, build_end(stored), calls, seconds)
    return stored, event, packed


def parse_end(text: str) -> RunEnd:
    """Return the end that the last event of a run describes. Raises ValidationError: the event is invalid."""
    event: dict[str, Any] = json.loads(text)
    return RunEnd.model_validate({name: event[name] for name in RunEnd.model_fields if name in event}, strict=False)


def _state(fields: Mapping[str, str]) -> DurableRunState:
    match fields.get("state"):
        case RunState.QUEUED.value:
            return DurableRunState.QUEUED
        case RunState.RUNNING.value:
            return DurableRunState.WAITING_FOR_APPROVAL if int(fields.get("asking") or 0) else DurableRunState.RUNNING
        case _:
            failure = fields.get("failure", "")
            if not failure:
                return DurableRunState.SUCCEEDED
            return DurableRunState.CANCELLED if failure == FailureKind.CANCELLED.value else DurableRunState.FAILED


def build_cancelled_outcome(run: str, record: RunRecord) -> ItemOutcome:
    """Return the outcome of an item whose batch was cancelled before the item started."""
    failure = Failure(
        kind=FailureKind.CANCELLED,
        code=ErrorCode.CANCELLED.value,
        message="the batch was cancelled before this item started",
    )
    custom_id, attempt = record.item.custom_id, record.attempt
    return ItemOutcome(custom_id=custom_id, run=run, status_code=499, failure=failure, attempt=attempt)
