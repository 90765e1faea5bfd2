"""Metrics page that Prometheus scrapes: the sums of the deployment, and its state at the time of the scrape."""

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from toolcrew.contract import metrics
from toolcrew.contract.hosts import RELEASE, HostReport
from toolcrew.contract.names import POOL_QUEUES
from toolcrew.orchestrator.metrics.samples import Samples, render
from toolcrew.store.connection import RedisAccessDenied, RedisClient, read_server_info
from toolcrew.store.hosts import HostStore
from toolcrew.store.metrics import MetricsStore, StoredCounts, is_mark
from toolcrew.store.slots import count_slots_in_use
from toolcrew.store.usage import UsageStore, show_amounts
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_LOST = 1000
"""Limit of the queues of hosts that do not report whose state is read."""
MAX_TENANTS = 200
"""Limit of tenants whose usage has its own series. The usage of all others is summed."""
_STATES = ("busy", "idle", "paused", "lost", "warm")
_NUMBERS = (bytes, int, float)


class MetricsPage:
    """Page of one deployment, for any number of readers.

    A number or message of another program that cannot be read is skipped and counted. Such a value never causes an
    error.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._hosts = HostStore(client, deployment)
        self._store = MetricsStore(client, deployment)
        self._usage = UsageStore(client, deployment)
        self._is_reported = False

    async def render(self, *, is_open: bool = False) -> bytes:
        """Return the metrics page. `is_open`: use the OpenMetrics format. Raises BrokerUnavailable."""
        began = time.monotonic()
        samples = Samples()
        reports, counts = await self._hosts.read(), await self._store.read_counts()
        _add_sums(samples, counts)
        await self._add_hosts(samples, reports)
        await self._add_queues(samples, reports, counts.queues)
        await self._add_tenants(samples, counts)
        await self._add_deployment(samples)
        await self._add_redis(samples)
        samples.set(metrics.BUILD, 1, RELEASE)
        samples.set(metrics.SCRAPE_SECONDS, time.monotonic() - began)
        return render(samples, is_open=is_open)

    async def _add_hosts(self, samples: Samples, reports: Sequence[HostReport]) -> None:
        for report in reports:
            samples.add(metrics.HOSTS, 1, report.kind, report.state)
        living = [report for report in reports if report.worker]
        for report in living:
            _add_host(samples, report)
        sandbox_hosts = [report for report in living if report.kind == "sandbox"]
        all_gauges = await self._store.read_gauges([report.queue for report in sandbox_hosts])
        for report, gauges in zip(sandbox_hosts, all_gauges, strict=True):
            states, target = gauges.get("sandboxes"), _number(gauges.get("warm_target"))
            if isinstance(states, Mapping):
                for state in _STATES:
                    samples.add(metrics.SANDBOXES, _number(states.get(state)) or 0.0, report.host, state)
            if target is not None:
                samples.add(metrics.WARM_TARGET, target, report.host)

    async def _add_queues(self, samples: Samples, reports: Sequence[HostReport], listed: Sequence[str]) -> None:
        alive = {report.queue for report in reports}
        own = sorted(queue for queue in alive if not queue.startswith("pool."))
        lost = [queue for queue in listed if queue not in alive]
        lost_queues = set([queue for queue in lost if not queue.startswith("pool.")][:MAX_LOST])
        queues = list(dict.fromkeys([*POOL_QUEUES.values(), *own, *sorted(lost_queues)]))
        states = dict(zip(queues, await self._store.read_queues(queues), strict=True))
        waits = await self._store.read_waits({queue: state.tenants for queue, state in states.items() if state.tenants})
        dead, messages = 0, 0
        for queue, state in states.items():
            samples.set(metrics.QUEUE_MESSAGES, state.messages, queue)
            samples.set(metrics.QUEUE_SLOTS, state.slots, queue)
            samples.set(metrics.QUEUE_SLOTS_IN_USE, count_slots_in_use(state.in_flight, state.slots), queue)
            samples.set(metrics.QUEUE_CALLS, state.in_flight, queue, "in_flight")
            samples.set(metrics.QUEUE_CALLS, state.waiting, queue, "waiting")
            samples.set(metrics.QUEUE_OLDEST_CALL, waits.get(queue, 0.0), queue)
            if state.oldest_s >= 0:
                samples.set(metrics.QUEUE_OLDEST, state.oldest_s, queue)
            samples.add(metrics.CALLS_RUNNING, state.messages, "queued")
            if queue in lost_queues and state.messages:
                dead, messages = dead + 1, messages + state.messages
        samples.set(metrics.CALLS_RUNNING, sum(report.busy for report in reports), "running")
        samples.set(metrics.DEAD_QUEUES, dead)
        samples.set(metrics.DEAD_MESSAGES, messages)
        samples.set(metrics.LOST_HOSTS, len(lost))

    async def _add_tenants(self, samples: Samples, counts: StoredCounts) -> None:
        samples.set(metrics.TENANTS, len(counts.registered))
        calls = await self._store.read_tenants(counts.tenants)
        for name, (in_flight, waiting) in zip(counts.tenants, calls, strict=True):
            samples.set(metrics.TENANT_CALLS, in_flight, name, "in_flight")
            samples.set(metrics.TENANT_CALLS, waiting, name, "waiting")
        used = await self._usage.read_today(counts.tenants)
        for at, (name, amounts) in enumerate(sorted(used.items(), key=lambda row: -_weigh(row[1]))):
            for amount, value in show_amounts(amounts).items():
                if value:
                    label = name if at < MAX_TENANTS else metrics.OTHER
                    samples.add(metrics.TENANT_USAGE, value, label, amount)

    async def _add_deployment(self, samples: Samples) -> None:
        state = await self._store.read_deployment()
        samples.set(metrics.RUNS, state.waiting_runs, "waiting")
        samples.set(metrics.RUNS, state.delayed_runs, "delayed")
        samples.set(metrics.RUNS, state.running_runs, "running")
        samples.set(metrics.BATCHES, state.batches)
        samples.set(metrics.APPROVALS_WAITING, state.approvals)

    async def _add_redis(self, samples: Samples) -> None:
        try:
            info = await read_server_info(self._client, "memory", "clients")
        except RedisAccessDenied as error:
            if not self._is_reported:
                self._is_reported = True
                log.warning(
                    "redis_memory_unknown",
                    error=str(error),
                    remedy="create Redis's users again with `toolcrew config users`",
                )
            return
        samples.set(metrics.REDIS_MEMORY, float(info["used_memory"]))
        samples.set(metrics.REDIS_MEMORY_MAX, float(info.get("maxmemory", 0)))
        samples.set(metrics.REDIS_CLIENTS, float(info["connected_clients"]))


def _weigh(amounts: Mapping[str, int]) -> int:
    """Return the sum of a tenant's CPU microseconds and tokens, by which tenants are sorted."""
    return sum(amounts.get(name, 0) for name in ("cpu_us", "prompt_tokens", "completion_tokens"))


@lru_cache(maxsize=16_384)
def _field(name: bytes) -> tuple[metrics.Metric, str, tuple[str, ...]] | None:
    """Return metric, part and labels of one field of the sums."""
    parsed = metrics.parse_field(name.decode(errors="replace"))
    if parsed is None:
        return None
    metric, part, labels = parsed
    return metric, part, tuple(metrics.clean_label(label) for label in labels)


def _add_sums(samples: Samples, counts: StoredCounts) -> None:
    unreadable = 0
    for name, text in counts.sums.items():
        field, value = _field(name), _number(text)
        if field is not None and value is not None:
            samples.add_part(*field, value)
        elif not is_mark(name.decode(errors="replace")):
            unreadable += 1
    for name, text in counts.refusals.items():
        value = _number(text)
        if (
            value is not None
            and len(samples.numbers[metrics.REFUSED_ENVELOPES.name]) < metrics.REFUSED_ENVELOPES.max_series
        ):
            samples.add(metrics.REFUSED_ENVELOPES, value, metrics.clean_label(name.decode(errors="replace")))
    samples.set(metrics.UNREADABLE, unreadable)


def _add_host(samples: Samples, report: HostReport) -> None:
    """Add the values of a worker. Workers of the same machine and kind are added together."""
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


def _number(stored: object) -> float | None:
    """Return the number of a sum or a gauge; None if it is not a number of at least 0."""
    try:
        value = float(stored) if isinstance(stored, _NUMBERS) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


async def render_metrics(client: RedisClient, deployment: str, *, is_open: bool = False) -> bytes:
    """Return the metrics page. A caller that needs the page repeatedly should create one MetricsPage instead. Raises
    BrokerUnavailable.
    """
    return await MetricsPage(client, deployment).render(is_open=is_open)
