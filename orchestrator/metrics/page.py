"""The page that Prometheus scrapes: the deployment's sums, and what Redis and the workers' reports say now."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from contract import metrics
from contract.hosts import RELEASE, HostReport
from contract.metric_counts import is_mark
from contract.names import (
    POOL_QUEUES,
    admission_prefix,
    deployment_key,
    host_gauges_key,
    hosts_key,
    metrics_key,
    refusals_key,
    seen_tenants_key,
    slots_key,
    tenants_key,
)
from contract.tenancy import DEFAULT_TENANT
from orchestrator.metrics.samples import Samples, render
from store.connection import NotPermitted, RedisClient, broker_errors
from store.hosts import HostStore
from store.run_keys import runs_prefix
from store.slots import count_slots_in_use
from telemetry.logs import get_logger

log = get_logger(__name__)

MOST_BATCHES = 1000
MOST_LOST = 1000
"""So many queues of hosts that do not report are looked into."""
LOOK_AT_ONCE = 250
"""Rows: between two looks Redis is free for others."""
_LOOK = Path(__file__).with_name("look.lua").read_text()
_STATES = ("busy", "idle", "paused", "lost", "warm")
_NUMBERS = (bytes, int, float)


@dataclass(frozen=True)
class _Known:
    """What Redis tells without a look: queues of hosts that are listed, sums, refusals, tenants that are registered, and all that may be told of."""

    listed: Sequence[str]
    sums: Mapping[bytes, bytes]
    refused: Mapping[bytes, bytes]
    registered: Sequence[str]
    tenants: Sequence[str]


class MetricsPage:
    """Of one deployment, for any number of readers. `has_tenants`: also what each tenant has running and waiting.

    What nobody can read any more, a number that somebody else wrote or a message of a stranger, is left out and counted, never an error.
    """

    def __init__(self, client: RedisClient, deployment: str, *, has_tenants: bool = True) -> None:
        self._client = client
        self._deployment = deployment
        self._has_tenants = has_tenants
        self._hosts = HostStore(client, deployment)
        prefixes = deployment_key(deployment, ""), admission_prefix(deployment), slots_key(deployment, ""), runs_prefix(deployment)
        self._places: tuple[str | int, ...] = (*prefixes, MOST_BATCHES)
        self._look = client.register_script(_LOOK)
        self._is_told = False

    async def render(self, *, is_open: bool = False) -> bytes:
        """As of now. `is_open`: as OpenMetrics. Raises BrokerUnavailable."""
        began = time.monotonic()
        samples = Samples()
        with broker_errors("the metrics were not read"):
            reports, known = await self._hosts.read(), await self._read()
            _add_sums(samples, known)
            await self._add_hosts(samples, reports)
            await self._add_queues(samples, reports, known.listed)
            await self._add_tenants(samples, known)
            await self._add_deployment(samples)
            await self._add_redis(samples)
        samples.set(metrics.BUILD, 1, RELEASE)
        samples.set(metrics.SCRAPE_SECONDS, time.monotonic() - began)
        return render(samples, is_open=is_open)

    async def _read(self) -> _Known:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.zrange(hosts_key(self._deployment), 0, -1)
            pipe.hgetall(metrics_key(self._deployment))
            pipe.hgetall(refusals_key(self._deployment))
            pipe.hkeys(tenants_key(self._deployment))
            pipe.zrange(seen_tenants_key(self._deployment), 0, -1)
            listed, sums, refused, fields, seen = await pipe.execute()
        registered = [name for name in _decoded(fields) if not name.startswith("#")]
        return _Known(_decoded(listed), sums, refused, registered, list({DEFAULT_TENANT, *registered, *_decoded(seen)}))

    async def _add_hosts(self, samples: Samples, reports: Sequence[HostReport]) -> None:
        for report in reports:
            samples.add(metrics.HOSTS, 1, report.kind, report.state)
        living = [report for report in reports if report.worker]
        for report in living:
            _add_host(samples, report)
        beside = [report for report in living if report.kind == "sandbox"]
        texts: Any = []
        if beside:
            texts = await self._asked(self._client.mget([host_gauges_key(self._deployment, report.queue) for report in beside]))
        for report, text in zip(beside, texts, strict=True):
            told = _parsed(text)
            states, target = told.get("sandboxes"), _number(told.get("warm_target"))
            if isinstance(states, Mapping):
                for state in _STATES:
                    samples.add(metrics.SANDBOXES, _number(states.get(state)) or 0.0, report.host, state)
            if target is not None:
                samples.add(metrics.WARM_TARGET, target, report.host)

    async def _add_queues(self, samples: Samples, reports: Sequence[HostReport], listed: Sequence[str]) -> None:
        alive = {report.queue for report in reports}
        own = sorted(queue for queue in alive if not queue.startswith("pool."))
        lost = [queue for queue in listed if queue not in alive]
        looked = set([queue for queue in lost if not queue.startswith("pool.")][:MOST_LOST])
        queues = list(dict.fromkeys([*POOL_QUEUES.values(), *own, *sorted(looked)]))
        found = await self._looked("queues", queues)
        waits = await self._waits({queue: tenants for queue, (*_, tenants) in zip(queues, found, strict=True) if tenants})
        dead, messages = 0, 0
        for queue, (length, age_s, slots, held, waiting, _) in zip(queues, found, strict=True):
            samples.set(metrics.QUEUE_MESSAGES, length, queue)
            samples.set(metrics.QUEUE_SLOTS, slots, queue)
            samples.set(metrics.QUEUE_SLOTS_IN_USE, count_slots_in_use(held, slots), queue)
            samples.set(metrics.QUEUE_CALLS, held, queue, "in_flight")
            samples.set(metrics.QUEUE_CALLS, waiting, queue, "waiting")
            samples.set(metrics.QUEUE_OLDEST_CALL, waits.get(queue, 0.0), queue)
            if age_s >= 0:
                samples.set(metrics.QUEUE_OLDEST, age_s, queue)
            samples.add(metrics.CALLS_RUNNING, length, "queued")
            if queue in looked and length:
                dead, messages = dead + 1, messages + length
        samples.set(metrics.CALLS_RUNNING, sum(report.busy for report in reports), "running")
        samples.set(metrics.DEAD_QUEUES, dead)
        samples.set(metrics.DEAD_MESSAGES, messages)
        samples.set(metrics.LOST_HOSTS, len(lost))

    async def _waits(self, tenants: Mapping[str, Sequence[str]]) -> Mapping[str, float]:
        """For how many seconds the oldest call of a queue waits for a slot."""
        waits: dict[str, float] = defaultdict(float)
        for rows in _parted(tenants):
            for (queue, _), waited_s in zip(rows, await self._look_at("waits", rows), strict=True):
                waits[queue] = max(waits[queue], waited_s)
        return waits

    async def _add_tenants(self, samples: Samples, known: _Known) -> None:
        samples.set(metrics.TENANTS, len(known.registered))
        if self._has_tenants:
            for name, (held, waiting) in zip(known.tenants, await self._looked("tenants", known.tenants), strict=True):
                samples.set(metrics.TENANT_CALLS, held, name, "in_flight")
                samples.set(metrics.TENANT_CALLS, waiting, name, "waiting")

    async def _add_deployment(self, samples: Samples) -> None:
        told = await self._look_at("deployment", ())
        for state, number in zip(("waiting", "delayed", "running"), told["runs"], strict=True):
            samples.set(metrics.RUNS, number, state)
        samples.set(metrics.BATCHES, told["batches"])
        samples.set(metrics.APPROVALS_WAITING, told["approvals"])

    async def _add_redis(self, samples: Samples) -> None:
        try:
            with broker_errors("Redis's memory was not read"):
                told: Any = await self._asked(self._client.info("memory"))
                clients: Any = await self._asked(self._client.info("clients"))
        except NotPermitted as error:
            if not self._is_told:
                self._is_told = True
                log.warning("redis_memory_not_told", error=str(error), remedy="make Redis's users anew with `toolcrew redis users`")
            return
        samples.set(metrics.REDIS_MEMORY, float(told["used_memory"]))
        samples.set(metrics.REDIS_MEMORY_MAX, float(told.get("maxmemory", 0)))
        samples.set(metrics.REDIS_CLIENTS, float(clients["connected_clients"]))

    async def _looked(self, what: str, rows: Sequence[Any]) -> list[Any]:
        """One answer a row."""
        found: list[Any] = []
        for at in range(0, len(rows), LOOK_AT_ONCE):
            found += await self._look_at(what, rows[at : at + LOOK_AT_ONCE])
        return found

    async def _look_at(self, what: str, rows: Sequence[Any]) -> Any:
        answer: bytes = await self._asked(self._look(keys=[], args=[what, json.dumps(rows), *self._places]))
        return json.loads(answer.decode(errors="replace"))

    async def _asked(self, asked: Any) -> Any:
        return await asked


@lru_cache(maxsize=16_384)
def _field(name: bytes) -> tuple[metrics.Metric, str, tuple[str, ...]] | None:
    """Metric, part and labels of a field of the sums."""
    known = metrics.parse_field(name.decode(errors="replace"))
    if known is None:
        return None
    metric, part, labels = known
    return metric, part, tuple(metrics.clean_label(label) for label in labels)


def _add_sums(samples: Samples, known: _Known) -> None:
    unreadable = 0
    for name, text in known.sums.items():
        field, value = _field(name), _number(text)
        if field is not None and value is not None:
            samples.add_part(*field, value)
        elif not is_mark(name.decode(errors="replace")):
            unreadable += 1
    for name, text in known.refused.items():
        value = _number(text)
        if value is not None and len(samples.numbers[metrics.REFUSED_ENVELOPES.name]) < metrics.REFUSED_ENVELOPES.most:
            samples.add(metrics.REFUSED_ENVELOPES, value, metrics.clean_label(name.decode(errors="replace")))
    samples.set(metrics.UNREADABLE, unreadable)


def _add_host(samples: Samples, report: HostReport) -> None:
    """Two workers of one machine and kind count together."""
    samples.add(metrics.HOST_SLOTS, report.slots, report.host, report.kind)
    samples.add(metrics.HOST_BUSY, report.busy, report.host, report.kind)
    samples.set(metrics.HOST_MEMORY, report.memory_free_bytes, report.host, report.kind)
    if report.kind == "sandbox":
        for metric, value in (
            (metrics.HOST_SESSIONS, report.sessions),
            (metrics.HOST_MAX_SESSIONS, report.max_sessions),
            (metrics.HOST_SANDBOXES, report.sandboxes),
            (metrics.HOST_MAX_SANDBOXES, report.max_sandboxes),
        ):
            samples.add(metric, value, report.host)
        samples.set(metrics.HOST_DISK, report.disk_free_bytes, report.host)


def _parted(tenants: Mapping[str, Sequence[str]]) -> Iterator[Sequence[tuple[str, Sequence[str]]]]:
    """The same, each time as much as one look takes: a tenant of a queue is as much as a row of other looks."""
    rows, left = list[tuple[str, Sequence[str]]](), LOOK_AT_ONCE
    for queue, names in tenants.items():
        for at in range(0, len(names), LOOK_AT_ONCE):
            part = names[at : at + LOOK_AT_ONCE]
            if len(part) > left:
                yield rows
                rows, left = [], LOOK_AT_ONCE
            rows.append((queue, part))
            left -= len(part)
    if rows:
        yield rows


def _decoded(names: Iterable[bytes]) -> list[str]:
    return [name.decode(errors="replace") for name in names]


def _parsed(text: object) -> Mapping[str, Any]:
    try:
        told = json.loads(text) if isinstance(text, bytes) else {}
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, Mapping) else {}


def _number(told: object) -> float | None:
    """A sum or a gauge; None for what is none."""
    try:
        value = float(told) if isinstance(told, _NUMBERS) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


async def render_metrics(client: RedisClient, deployment: str, *, has_tenants: bool = True, is_open: bool = False) -> bytes:
    """The page once. Who gives it often keeps a MetricsPage. Raises BrokerUnavailable."""
    return await MetricsPage(client, deployment, has_tenants=has_tenants).render(is_open=is_open)
