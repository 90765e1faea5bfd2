"""The records of batches: items and outcomes, the state of a batch, and the stream of its events."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Literal

import redis.asyncio
from pydantic import Field, JsonValue, ValidationError

from contract.calls import Record
from contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, RecordRefused
from contract.functions.completions import Usage
from contract.names import tenant_key
from contract.run_events import PROGRESS_EVENTS, Failure, FailureKind, RunEnded, RunEvent, parse_event
from contract.signing import SigningKeys
from store.connection import broker_errors
from store.tasks import check_cancelled
from telemetry.logs import get_logger

log = get_logger(__name__)

RUN_TTL_S = 30 * 24 * 3600
"""How long a run and its batch are stored after the last change."""
HOSTED_BATCH = "@runs"
"""The batch of each tenant's hosted runs, which never ends. No submitted batch can have this name."""


def batch_key(deployment: str, tenant: str, batch: str) -> str:
    """Return the key of the hash of a batch (BatchRecord). With suffixes: `:waiting` (sorted set), `:delayed` and
    `:running` (sets), `:ended` (sorted set) and `:items` (list) of its runs' ids, and `:events` (stream). HOSTED_BATCH
    has `:index` (sorted set, by when they were started), its parts `:succeeded`, `:failed` and `:cancelled`, and
    `:sessions` (hash, of the sessions in which hosted runs work)."""
    return tenant_key(deployment, tenant, f"batch.{batch}")


def batches_key(deployment: str, tenant: str) -> str:
    """Return the key of the sorted set of a tenant's batches, by when they were submitted. It may contain batches that
    have expired.
    """
    return tenant_key(deployment, tenant, "batch-ids")


def member(tenant: str, name: str) -> str:
    """Return the name of a tenant's run or batch in the deployment's sets; a tenant's name has no bar."""
    return f"{tenant}|{name}"


def split_member(text: str) -> tuple[str, str]:
    tenant, _, name = text.partition("|")
    return tenant, name


MAX_ID_CHARS = 256
MAX_ITEMS = 50_000
MAX_INPUT_BYTES = 200 * 1024 * 1024
RUNS_URL, CALLS_URL, CHAT_URL = "/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"


class RunLimits(Record):
    """The limits of an item's run; None: the batch's, else the defaults of ReActOptions."""

    max_iterations: int | None = Field(default=None, ge=1)
    tool_timeout_s: float | None = Field(default=None, gt=0)
    max_wall_s: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: float | None = Field(default=None, gt=0)


class Ground(Record):
    """Where an item works. `workspace`: a folder, an archive or a git bundle, read by the orchestrator, or a file of
    the store (store/archives/files.py), read by the host; `restore`: a checkpoint instead.

    `artifacts`: patterns below /workspace of what is to be copied out at the end. `session`: an open one of the
    tenant's, instead of one of the item's own; it stays open. Left out of the bytes where there is none: releases
    before it can read those.
    """

    workspace: str | None = None
    restore: str | None = None
    image: str | None = None
    network: Literal["none", "egress"] | None = None
    artifacts: tuple[str, ...] = ()
    session: str | None = Field(default=None, exclude_if=lambda session: session is None)


class RunBody(Record):
    """An agent run. `history`: messages before the instruction, in the OpenAI wire shape. `tools` None: all that the
    model can cope with.
    """

    instruction: str = Field(min_length=1)
    history: tuple[dict[str, JsonValue], ...] = ()
    model: str | None = None
    dialect: Literal["native", "tags", "json", "auto"] | None = None
    profile: Literal["small", "standard", "auto"] | None = Field(
        default=None, exclude_if=lambda profile: profile is None
    )
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
    """One line. `line`: its number in the file, from 1. `url`: the shape that its row's body has. `priority`: higher
    ones begin first.
    """

    custom_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    line: int = Field(ge=1)
    url: Literal["/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"]
    work: RunBody | CallBody
    ground: Ground = Ground()
    priority: int = Field(default=0, ge=-100, le=100)


class Outcome(Record):
    """The end of an item: exactly one for each run. `run`: its id; `body`: the response in the row, None for a failure
    without any.

    A failed run keeps its body, too, where it has one: the last text, the steps, the usage.
    """

    custom_id: str
    run: str
    status_code: int = Field(ge=100, le=599)
    body: dict[str, JsonValue] | None = None
    failure: Failure | None = None
    attempt: int = Field(default=1, ge=1)


class BatchState(StrEnum):
    """`cancelling`: what runs is being ended."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"


class BatchDefaults(Record):
    """What holds for lines that do not say it. `retries`: how often an item is started again after an infrastructure
    failure.
    """

    model: str | None = None
    dialect: str | None = None
    profile: str | None = Field(default=None, exclude_if=lambda profile: profile is None)
    limits: RunLimits = RunLimits()
    prompt_price: float | None = Field(default=None, ge=0)
    completion_price: float | None = Field(default=None, ge=0)
    retries: int = Field(default=2, ge=0, le=20)
    artifacts: str | None = None
    """The folder that items' artifacts are copied to, on the machine of the orchestrator. None: they go to the
    store.
    """
    asks_people: bool = Field(default=False, exclude_if=lambda asks: not asks)
    """Approvals are asked in the queue of questions (docs/approvals.md). False is left out of the bytes, so that
    earlier releases can read them.
    """


class RowPlace(Record):
    """Where the rows of a batch were last written. `host`: the name of the machine of these paths."""

    host: str
    output: str
    errors: str


class BatchRecord(Record):
    """`sha256`: of the input file; `concurrency`: items at a time, over all orchestrators. `failed`: by kind.
    `is_detached`: run by the orchestrators of the service; else by the process that names the batch."""

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


def seal_item(keys: SigningKeys, tenant: str, run: str, batch: str, item: BatchItem) -> str:
    """Return the signed item of that run of that batch."""
    return keys.seal(f"item {tenant} {run} {batch}", item.model_dump_json())


def open_item(keys: SigningKeys, tenant: str, run: str, batch: str, sealed: str | bytes) -> BatchItem:
    """Return the item. Raises ConfigError when it is not signed for that run and batch, or was written by another
    release.
    """
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


def parse_batch(keys: SigningKeys, tenant: str, batch: str, fields: Mapping[bytes, bytes]) -> BatchRecord:
    """Return the record of a batch's hash. Raises ConfigError as `parse_run` does."""
    values: dict[str, Any] = decode_fields(fields)
    with readable(f"batch {batch} of tenant {tenant}"):
        values["defaults"] = BatchDefaults.model_validate_json(
            keys.unseal(f"defaults {tenant} {batch}", values.get("defaults", ""))
        )
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


def decode_fields(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}


def final_state(failure: Failure | None) -> str:
    """Return the state of a run that has ended: succeeded, failed or cancelled."""
    if failure is None:
        return "succeeded"
    return "cancelled" if failure.kind is FailureKind.CANCELLED else "failed"


def build_recalled_end(outcome: Outcome, at: float) -> RunEnded:
    """Return the end of an item that ended before these events began, from its row, without times."""
    body = outcome.body or {}
    usage, cost, steps = body.get("usage"), body.get("cost"), body.get("steps")
    counts = usage if isinstance(usage, dict) else {}
    return RunEnded(
        run=outcome.run,
        at=at,
        attempt=outcome.attempt,
        item=outcome.custom_id,
        state=final_state(outcome.failure),
        failure=outcome.failure,
        steps=steps if isinstance(steps, int) else 0,
        usage=Usage(*(_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens", "cached_tokens"))),
        cost=cost if isinstance(cost, float) else None,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def parse_batch_event(text: str | bytes) -> RunEvent:
    """Return one of PROGRESS_EVENTS. Raises ValueError for anything else."""
    event = parse_event(json.loads(text))
    if not isinstance(event, PROGRESS_EVENTS):
        raise ValueError("this is no event of a batch")
    return event


KEPT = 20_000
"""Events that a stream holds: a reader that is further behind misses some, but no outcome, which the runs' records
have.
"""
EVERY_S = 0.2
AT_ONCE = 1000
MAX_UNWRITTEN = 50_000
START = "0"


class BatchEventWriter:
    """Writes events in groups. Drops events when Redis does not answer for long: no result depends on them."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._unwritten: list[tuple[str, str]] = []
        self._dropped = 0

    def add(self, tenant: str, batch: str, batch_event: RunEvent) -> None:
        """Queue one of PROGRESS_EVENTS. Hosted runs have a stream of their own (store/run_events.py)."""
        if batch == HOSTED_BATCH:
            return
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._dropped += 1
            return
        self._unwritten.append(
            (
                batch_key(self._deployment, tenant, batch) + ":events",
                json.dumps(batch_event.to_json(), separators=(",", ":")),
            )
        )

    async def run(self) -> None:
        """Write until cancelled; then write the rest."""
        try:
            while True:
                check_cancelled()
                await asyncio.sleep(EVERY_S)
                await self.flush()
        finally:
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Write the queued events, if Redis answers."""
        while self._unwritten:
            some = self._unwritten[:AT_ONCE]
            pipe = self._client.pipeline(transaction=False)
            for key, text in some:
                pipe.xadd(key, {"h": text}, maxlen=KEPT, approximate=True)
            for key in {key for key, _ in some}:
                pipe.expire(key, RUN_TTL_S)
            try:
                with broker_errors("the events were not written"):
                    await pipe.execute()
            except BrokerUnavailable as error:
                log.warning(
                    "batch_events_not_written", waiting=len(self._unwritten), dropped=self._dropped, error=str(error)
                )
                return
            del self._unwritten[: len(some)]


class BatchEventReader:
    """A reader of one batch's stream."""

    def __init__(
        self, client: "redis.asyncio.Redis", deployment: str, tenant: str, batch: str, after: str = START
    ) -> None:
        self._client = client
        self._key = batch_key(deployment, tenant, batch) + ":events"
        self._after = after

    async def read(self, wait_s: float) -> Sequence[RunEvent]:
        """Return the events since the last read; wait up to `wait_s` for one. Raises BrokerUnavailable."""
        with broker_errors("the events of the batch were not read"):
            reply: Any = await self._client.xread(
                {self._key: self._after}, count=AT_ONCE, block=max(1, int(wait_s * 1000))
            )
        batch_events: list[RunEvent] = []
        for entry in _entries(reply):
            self._after = entry[0].decode()
            batch_events.append(parse_batch_event(entry[1][b"h"]))
        return batch_events


def _entries(reply: Any) -> list[Any]:
    """Return the entries of the one stream from either shape of the reply: a list of pairs, or a dict."""
    if not reply:
        return []
    streams = list(reply.values()) if isinstance(reply, dict) else [stream[1] for stream in reply]
    entries = streams[0]
    # RESP3 wraps the entries of a stream in a list.
    return (
        list(entries[0])
        if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], (list, tuple))
        else list(entries)
    )
