"""Metrics: the counts of each process, the sums of the deployment, and the present state of the deployment.

Invariant: every count enters the sums exactly once. A process sends totals, never increments. Redis stores the totals
of each source that are already in the sums (`counted_key`). One atomic step adds the difference and stores the new
totals. Lost replies, restarted workers next to the same sandboxd, and a Redis that loses its last second therefore
change no sum.
"""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolcrew.contract.errors import BrokerUnavailable, RefusalReason
from toolcrew.contract.hosts import HOST_TTL_S
from toolcrew.contract.metrics import (
    BUCKET,
    COUNT,
    METRICS,
    SERIES_MARK,
    SUM,
    Metric,
    clean_label,
    encode_series,
    overflow_series,
)
from toolcrew.contract.names import (
    active_tenants_key,
    admission_prefix,
    deployment_key,
    hosts_key,
    refusals_key,
    runs_prefix,
    slots_key,
    tenants_key,
)
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.scripts import Script, Value
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

COUNTED_TTL_S = 7 * 24 * 3600
"""Lifetime of the totals of a source that sends nothing, in seconds."""
MAX_VALUE = 1e15
"""Maximum value that is counted. A limit is needed because a model server may report any number."""
MAX_BATCHES = 1000
ROWS_PER_READ = 250
"""Number of entries of a hash or set that one run of the script reads. Between two runs, Redis serves other clients."""
_FIELDS_AT_ONCE = 500
_NOT_SENT = "the counts were not sent"
_NOT_READ = "the metrics were not read"


def metrics_key(deployment: str) -> str:
    """Return the key of the hash with the sums of all metrics of the deployment (contract/metrics.py)."""
    return deployment_key(deployment, "metrics")


def counted_key(deployment: str, source: str) -> str:
    """Return the key of a hash of totals of one source (process). The hash contains the part of each total that was
    already added to the deployment's sums.
    """
    return deployment_key(deployment, f"metrics:counted.{source}")


def host_gauges_key(deployment: str, queue: str) -> str:
    """Return the key of the state of a host's sandboxd, as JSON. The key expires if the worker of the host does not
    renew it.
    """
    return deployment_key(deployment, f"host:{queue}:gauges")


# --- Counts of a process ----------------------------------------------------------------------------------------------

# `counted`: the totals of this source that are already in the sums. `counts`: for each number its metric, the limit of
# its series, the field that marks the series as existing, its field, the field of the overflow series, its total, and
# the total that the source knows as added.
ABSORB = Script(
    """
for at = 1, #counts, 7 do
  local metric, max_series, mark = counts[at], tonumber(counts[at + 1]), counts[at + 2]
  local field, spare = counts[at + 3], counts[at + 4]
  local total = tonumber(counts[at + 5])
  local more = total - (tonumber(redis.call('HGET', counted, field) or counts[at + 6]) or 0)
  if more > 0 then
    local into = field
    if field ~= spare and redis.call('HEXISTS', sums, mark) == 0 then
      local series = tonumber(redis.call('HGET', sums, '#' .. metric) or nil) or 0
      if series >= max_series then
        into = spare
      else
        redis.call('HSET', sums, '#' .. metric, string.format('%d', series + 1))
      end
      if into == field and field ~= mark then redis.call('HSET', sums, mark, '0') end
    end
    local added = redis.pcall('HINCRBYFLOAT', sums, into, string.format('%.17g', more))
    -- Another program wrote a value that is not a number.
    if type(added) == 'table' and added.err then redis.call('HSET', sums, into, string.format('%.17g', more)) end
    redis.call('HSET', counted, field, counts[at + 5])
  end
end
redis.call('EXPIRE', counted, ttl_s)
return 1
""",
    keys=("sums", "counted"),
    args=("ttl_s", "counts..."),
)


@dataclass(frozen=True)
class PendingCounts:
    """Totals that are being sent. `arguments`: `counts` of the script."""

    totals: Mapping[str, float]
    arguments: tuple[str, ...]


def absorb_values(deployment: str, source: str, pending: PendingCounts) -> dict[str, Value]:
    """Return the keys and arguments of ABSORB."""
    return {
        "sums": metrics_key(deployment),
        "counted": counted_key(deployment, source),
        "ttl_s": COUNTED_TTL_S,
        "counts": pending.arguments,
    }


class _Series:
    """The fields of one series."""

    __slots__ = ("buckets", "count", "field", "sum")

    def __init__(self, series: str, metric: Metric) -> None:
        self.field = f"\t{series}"
        self.count = f"{COUNT}\t{series}"
        self.sum = f"{SUM}\t{series}"
        self.buckets = (*(f"{BUCKET}{bound:g}\t{series}" for bound in metric.buckets), "")


class Counts:
    """Totals since the start of the source, with a limited number of series for each metric. Not thread-safe."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._added: dict[str, float] = {}
        self._changed: set[str] = set()
        self._series: dict[tuple[str, ...], _Series] = {}
        self._numbers: dict[str, int] = {}

    def count(self, metric: Metric, *labels: str, by: float = 1.0) -> None:
        """Add `by` to a counter. A negative or non-finite value adds nothing."""
        self._add(self._find(metric, labels).field, by)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add one value to a histogram."""
        series = self._find(metric, labels)
        self._add(series.count, 1.0)
        self._add(series.sum, value)
        # A value beyond the last bucket is only in the count.
        bucket = series.buckets[bisect_left(metric.buckets, value)]
        if bucket:
            self._add(bucket, 1.0)

    def set_total(self, metric: Metric, part: str, total: float, *labels: str) -> None:
        """Set a total that another program has counted. A total that is not larger than before changes nothing."""
        field, value = f"{part}{self._find(metric, labels).field}", _sensible(total)
        if value > self._totals.get(field, 0.0):
            self._totals[field] = value
            self._changed.add(field)

    def pending(self) -> PendingCounts | None:
        """Return the next totals to send; None if Redis has all current totals."""
        if not self._changed:
            return None
        # The count of a histogram must come before its other parts, because the count marks the series as existing.
        fields = sorted(self._changed)[:_FIELDS_AT_ONCE]
        totals = {field: self._totals[field] for field in fields}
        arguments = list[str]()
        for field, total in totals.items():
            part, series = field.split("\t", 1)
            metric = METRICS[series.split("\t", 1)[0]]
            mark = COUNT if metric.kind == "histogram" else ""
            added = repr(self._added.get(field, 0.0))
            arguments += [
                metric.name,
                str(metric.max_series),
                f"{mark}\t{series}",
                field,
                f"{part}\t{overflow_series(metric)}",
                repr(total),
                added,
            ]
        return PendingCounts(totals, tuple(arguments))

    def settle(self, pending: PendingCounts) -> None:
        """Record that Redis has these totals. A total that has grown in the meantime is sent again later."""
        for field, total in pending.totals.items():
            self._added[field] = total
            if self._totals[field] == total:
                self._changed.discard(field)

    def _add(self, field: str, by: float) -> None:
        more = by if by == 1.0 else _sensible(by)
        if more:
            self._totals[field] = self._totals.get(field, 0.0) + more
            self._changed.add(field)

    def _find(self, metric: Metric, labels: tuple[str, ...]) -> _Series:
        """Return the series with these label values. Return the overflow series if this source has too many series."""
        key = (metric.name, *labels)
        series = self._series.get(key)
        if series is None:
            if self._numbers.get(metric.name, 0) >= metric.max_series:
                return _Series(overflow_series(metric), metric)
            self._numbers[metric.name] = self._numbers.get(metric.name, 0) + 1
            series = self._series[key] = _Series(
                encode_series(metric, [clean_label(label) for label in labels]), metric
            )
        return series


def is_mark(field: str) -> bool:
    """Return whether a field of the hash of sums only counts the series of a metric, and is not a value of a series."""
    return field.startswith(SERIES_MARK)


def _sensible(value: float) -> float:
    return min(max(0.0, value), MAX_VALUE) if math.isfinite(value) else 0.0


# --- Orchestrators ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredCounts:
    """The stored sums of all metrics, and the names for which gauges are read. `queues`: the queues of all listed
    workers, with or without a report. `sums`: field -> number (contract/metrics.py). `refusals`: reason -> number.
    `tenants`: registered tenants, the default tenant, and tenants that have opened sessions.
    """

    queues: Sequence[str]
    sums: Mapping[bytes, bytes]
    refusals: Mapping[bytes, bytes]
    registered: Sequence[str]
    tenants: Sequence[str]


class QueueState(NamedTuple):
    """Age and waiting tenants of a queue. `oldest_s`: age of the oldest message, -1 if unknown. `tenants`: tenants
    whose calls wait for a slot.
    """

    messages: int
    oldest_s: float
    slots: int
    in_flight: int
    waiting: int
    tenants: Sequence[str]


@dataclass(frozen=True)
class DeploymentState:
    """State of a deployment for the metrics: the numbers of runs, of unfinished batches, and of approval questions that
    wait for a person.
    """

    waiting_runs: int
    delayed_runs: int
    running_runs: int
    batches: int
    approvals: int


class MetricsStore:
    """Counts and state of a deployment, for orchestrators. Every method raises BrokerUnavailable when Redis does not
    answer.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._key_parts = {
            "deployment": deployment_key(deployment, ""),
            "admission": admission_prefix(deployment),
            "slots": slots_key(deployment, ""),
            "runs": runs_prefix(deployment),
        }
        self._script = Script.load("metrics.lua", args=("subject", "rows_json", *self._key_parts, "batch_limit"))

    async def absorb(self, source: str, counts: Counts) -> None:
        """Add the changed totals of a process to the sums of the deployment. `source`: the id of the process."""
        while (pending := counts.pending()) is not None:
            with broker_errors(_NOT_SENT):
                await ABSORB.run(self._client, **absorb_values(self._deployment, source, pending))
            counts.settle(pending)

    async def read_counts(self) -> StoredCounts:
        """Return the sums, and the names of queues and tenants."""
        with broker_errors(_NOT_READ):
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zrange(hosts_key(self._deployment), 0, -1)
                pipe.hgetall(metrics_key(self._deployment))
                pipe.hgetall(refusals_key(self._deployment))
                pipe.hkeys(tenants_key(self._deployment))
                pipe.zrange(active_tenants_key(self._deployment), 0, -1)
                queues, sums, refusals, fields, active = await pipe.execute()
        registered = [name for name in _decode(fields) if not name.startswith("#")]
        tenants = {DEFAULT_TENANT, *registered, *_decode(active)}
        return StoredCounts(_decode(queues), sums, refusals, registered, list(tenants))

    async def read_refusals(self) -> dict[str, str]:
        """Return how many messages the workers have refused, by reason."""
        with broker_errors("the refusals were not read"):
            refusals: Any = await self._client.hgetall(refusals_key(self._deployment))
        return {reason.decode(errors="replace"): count.decode(errors="replace") for reason, count in refusals.items()}

    async def read_gauges(self, queues: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return the state of the sandboxd of each queue. The state is empty if none is stored or if it cannot be
        read.
        """
        with broker_errors(_NOT_READ):
            texts: Any = (
                await self._client.mget([host_gauges_key(self._deployment, queue) for queue in queues])
                if queues
                else []
            )
        return [_parse_gauges(text) for text in texts]

    async def read_queues(self, queues: Sequence[str]) -> list[QueueState]:
        return [QueueState(*row) for row in await self._read_rows("queues", queues)]

    async def read_waits(self, tenants: Mapping[str, Sequence[str]]) -> Mapping[str, float]:
        """Return how long the oldest call of each queue has waited for a slot, in seconds. `tenants`: queue -> tenants
        with waiting calls.
        """
        waits: dict[str, float] = defaultdict(float)
        for rows in _split(tenants):
            for (queue, _), waited_s in zip(rows, await self._run("waits", rows), strict=True):
                waits[queue] = max(waits[queue], waited_s)
        return waits

    async def read_tenants(self, tenants: Sequence[str]) -> list[tuple[int, int]]:
        """Return for each tenant how many calls are in flight, and how many wait."""
        return [(in_flight, waiting) for in_flight, waiting in await self._read_rows("tenants", tenants)]

    async def read_deployment(self) -> DeploymentState:
        state = await self._run("deployment", ())
        waiting, delayed, running = state["runs"]
        return DeploymentState(waiting, delayed, running, state["batches"], state["approvals"])

    async def _read_rows(self, subject: str, rows: Sequence[str]) -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(rows), ROWS_PER_READ):
            results += await self._run(subject, rows[start : start + ROWS_PER_READ])
        return results

    async def _run(self, subject: str, rows: Sequence[Any]) -> Any:
        with broker_errors(_NOT_READ):
            text = await self._script.run(
                self._client, subject=subject, rows_json=json.dumps(rows), batch_limit=MAX_BATCHES, **self._key_parts
            )
        return json.loads(text.decode(errors="replace"))


def _split(tenants: Mapping[str, Sequence[str]]) -> Iterator[Sequence[tuple[str, Sequence[str]]]]:
    """Split the rows into parts of at most ROWS_PER_READ tenants, because reading one tenant of a queue takes as long
    as reading one row elsewhere.
    """
    rows, free = list[tuple[str, Sequence[str]]](), ROWS_PER_READ
    for queue, names in tenants.items():
        for start in range(0, len(names), ROWS_PER_READ):
            part = names[start : start + ROWS_PER_READ]
            if len(part) > free:
                yield rows
                rows, free = [], ROWS_PER_READ
            rows.append((queue, part))
            free -= len(part)
    if rows:
        yield rows


def _decode(names: Iterable[bytes]) -> list[str]:
    return [name.decode(errors="replace") for name in names]


def _parse_gauges(text: object) -> Mapping[str, Any]:
    try:
        gauges = json.loads(text) if isinstance(text, bytes) else {}
    except (ValueError, RecursionError):
        return {}
    return gauges if isinstance(gauges, Mapping) else {}


# --- Workers ----------------------------------------------------------------------------------------------------------


class WorkerMetricsStore:
    """Counts and state of a worker's sandboxd. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: SyncRedis, deployment: str) -> None:
        """Create a store. `client` must send every command once."""
        self._client = client
        self._deployment = deployment

    def absorb(self, source: str, counts: Counts) -> None:
        """Add the changed totals of a process to the sums of the deployment. `source`: the id of the process."""
        while (pending := counts.pending()) is not None:
            with broker_errors(_NOT_SENT):
                ABSORB.run_blocking(self._client, **absorb_values(self._deployment, source, pending))
            counts.settle(pending)

    def set_gauges(self, queue: str, gauges: Mapping[str, Any]) -> None:
        """Store the state of sandboxd, with the lifetime of the worker's report."""
        with broker_errors(_NOT_SENT):
            self._client.set(host_gauges_key(self._deployment, queue), json.dumps(gauges), ex=HOST_TTL_S)


class RefusalCounter:
    """Counts refused messages by reason, in one hash of the deployment. `client` must send every command once
    (`connect_once`).
    """

    def __init__(self, client: SyncRedis, deployment: str) -> None:
        self._client = client
        self._key = refusals_key(deployment)

    def count(self, reason: RefusalReason) -> None:
        """Add one refused message. If Redis does not answer, only the log records the refusal."""
        try:
            with broker_errors("the refusal was not counted"):
                self._client.hincrby(self._key, reason, 1)
        except BrokerUnavailable as error:
            log.warning("refusal_not_counted", reason=reason, error=str(error))
